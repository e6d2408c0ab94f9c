"""Where JAX asks for its CPU backend: other threads of the process wait here while there is no world.

A user's thread, such as one that reads data, may use JAX at any moment. Between two worlds JAX has no backend and would
make one by itself, outside of any world, and the world that is being joined could not replace it.
"""

import threading

from jax._src import xla_bridge

from resilient_jax.jax_runtime.jaxlib_types import Backend


class BackendGate:
    """JAX's factory of CPU backends, once this process has begun to join worlds.

    A waiting thread owns JAX's lock of backends: between worlds the thread that joins them must not take that lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._backend: Backend | None = None
        self._joiner: threading.Thread | None = None
        self._is_over = False
        """All guarded by the condition."""

    @property
    def is_installed(self) -> bool:
        """Whether JAX calls this gate for its backend."""
        with self._changed:
            return self._joiner is not None

    def install(self) -> None:
        """Make JAX call this gate for its backend. The calling thread is the one that joins worlds, and never waits.

        Raises:
            RuntimeError: JAX has a backend.
        """
        xla_bridge.register_backend_factory("cpu", self.take_backend, priority=0, fail_quietly=False)
        with self._changed:
            self._joiner = threading.current_thread()

    def set_backend(self, backend: Backend) -> None:
        """Set the backend of a world; the next thread that uses JAX, or one that waits, takes it."""
        with self._changed:
            self._backend = backend
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting: there will be no other world, and threads get a backend of this process alone."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def take_backend(self) -> Backend:
        """Return the backend of the world, and keep no reference, which would outlive the world.

        Between worlds the thread that joins them gets a backend of this process alone; after the last, all threads do.
        """
        with self._changed:
            while self._backend is None:
                # Without the joining thread no world would be joined, and no backend set: it must not wait here.
                if self._is_over or threading.current_thread() is self._joiner:
                    return xla_bridge.make_cpu_client()
                self._changed.wait()
            backend, self._backend = self._backend, None
            return backend
