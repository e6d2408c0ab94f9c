"""Joins and leaves JAX worlds, and breaks the main thread out of either and of collectives."""

import dataclasses
import os
import time
from typing import Final

import jax

from resilient_jax.errors import StateError
from resilient_jax.jax_runtime.abort import abort_collectives
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.distributed import LeakCounts, WorldConnection, connect, disconnect
from resilient_jax.jax_runtime.local_clique import form_local_clique
from resilient_jax.jax_runtime.world_forming import interrupt_forming, is_detached
from resilient_jax.protocol.worker_messages import FormWorld, WorkerSettings

UNWINDING_GRACE_S: Final = 0.5
"""gloo unwinds within milliseconds, with large arrays in flight within 0.5 s, or not at all."""


class WorldConnector:
    """This worker's connection to at most one world at a time."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._connection: WorldConnection | None = None
        self._interrupting_since_s: float | None = None
        self._is_local_clique_broken = False
        self._has_given_up = False
        """Whether a thread was left behind in a collective of this world."""

    @property
    def is_broken(self) -> bool:
        """Whether a shrink in place is impossible.

        The local clique is broken, a collective was given up, or the service was found dead.
        """
        return self._is_local_clique_broken or self._has_given_up or is_detached()

    def begin_generation(self) -> None:
        """Forget that the previous generation was interrupted."""
        self._interrupting_since_s = None

    def join(self, order: FormWorld) -> None:
        """Connect to the order's world.

        Raises:
            FormingInterrupted, FormingFailed: see `connect`.
            StateError: this host has fewer devices than it was started for, or no GPU.
        """
        generation = order.generation
        member = generation.find_member(order.host)
        assert member is not None, "an agent orders only members to form a world"
        connection = connect(
            order.relay_address,
            member.process_index,
            len(generation.members),
            timeout_s=self._settings.forming_timeout_s,
            bind_host=self._settings.address,
        )
        self._connection = connection  # so that an interruption reaches the forming of the local clique
        self._connection = dataclasses.replace(connection, gloo=form_local_clique(connection.gloo))
        self._is_local_clique_broken = self._has_given_up = False
        self._check_devices()

    def leave(self, *, is_backend_in_use: bool) -> LeakCounts:
        """Disconnect from the world, and return what could not be freed.

        Args:
            is_backend_in_use: a thread still compiles for the world's devices.
        """
        connection, self._connection = self._connection, None
        assert connection is not None, "leave is called in a world"
        return disconnect(connection.gloo, is_backend_in_use=is_backend_in_use or self._has_given_up)

    @property
    def is_connected(self) -> bool:
        """Whether this worker is in a world."""
        return self._connection is not None

    def interrupt(self) -> None:
        """Break the main thread out of forming or of a collective; for the guard thread, which repeats it.

        The clique of the local devices is spared at first, because it survives a shrink. But if one device's part of a
        program failed, another device may wait for it in that very clique; and gloo may wait for a connection that it
        has closed. So that clique is broken, too, and the collective is given up, when the main thread has not unwound
        soon; the next world must then be a new one.
        """
        now_s = time.monotonic()
        if self._interrupting_since_s is None:
            self._interrupting_since_s = now_s
        interrupt_forming()
        connection = self._connection
        if connection is None:
            return
        gloo = connection.gloo
        is_late = now_s - self._interrupting_since_s > UNWINDING_GRACE_S
        if is_late and gloo.local_clique:
            gloo = dataclasses.replace(gloo, local_clique=frozenset())
            self._is_local_clique_broken = True
        abort_collectives(gloo)
        # Only gloo: a thread in NCCL keeps the device, which the next world needs.
        if is_late and gloo.own_listeners and collective_thread.give_up():
            self._has_given_up = True

    def _check_devices(self) -> None:
        # JAX takes the next platform of the list without a word where CUDA's plugin is not installed.
        wanted = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
        if wanted == "cuda" and jax.default_backend() == "cpu":
            raise StateError(
                f"--platform gpu: found CPU devices alone on host {self._settings.host}, expected GPUs. Install "
                "the extra cuda12 (pip install -e '.[cuda12]') and see whether nvidia-smi lists the GPUs, or start "
                "with --platform cpu"
            )
        expected = self._settings.devices_per_host
        found = jax.local_device_count()
        if expected is not None and found < expected:
            raise StateError(
                f"host {self._settings.host} has {found} devices, but --devices-per-host asks for {expected}; ask "
                "for fewer, or start it where there are more"
            )
