"""Counts what a worker compiles, loads and fetches in a generation, and reports what training had to wait for."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax

from resilient_jax.compile.ahead_of_time import check_canceled, is_compiling_ahead
from resilient_jax.compile.program_exchange import ProgramDirectory
from resilient_jax.compile.program_fetcher import Patience, ProgramFetcher
from resilient_jax.compile.training_threads import is_training_thread
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.compile_cache import CACHE_SUFFIX
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationScoped
from resilient_jax.transport.credentials import Credentials

COMPILE_EVENTS: Final = frozenset(
    f"/jax/core/compile/{phase}_duration"
    for phase in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
"""JAX's durations of the phases of a compilation; the last one includes loading a program from the cache."""
MIN_REPORTED_S: Final = 0.05
"""Programs that compile faster are counted, but not reported one by one."""
DIGEST_CHARACTERS: Final = 12
"""Of a key's digest in an event: enough to tell two programs of one name apart."""


class CompilationMonitor(GenerationScoped):
    """Connects JAX's compilation cache with the other hosts and the event log. One for each process.

    Args:
        directory: directory of this host's programs; None: JAX's cache is off.
        record_event: writes an event; called on any thread.
        raise_if_ended: raises when the generation has ended; called by training while it waits, on any thread of
            training.
        hit_failpoint: called before training compiles a program.

    Attributes:
        fetcher: fetches from the other hosts.
    """

    def __init__(
        self,
        host: HostName,
        credentials: Credentials,
        directory: ProgramDirectory | None,
        *,
        record_event: Callable[..., Event],
        raise_if_ended: Callable[[], None],
        hit_failpoint: Callable[[FailPoint], None],
    ) -> None:
        self._record_event = record_event
        self._raise_if_ended = raise_if_ended
        self._hit_failpoint = hit_failpoint
        self.fetcher = ProgramFetcher(host, credentials, directory, self._find_patience, self._on_failure)
        self._lock = threading.Lock()
        self._seconds = self._compiled_s = 0.0
        self._compiled = self._fetched = 0
        """Since the generation began, only what training waited for. Guarded by the lock."""
        self._is_reported = True
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def begin_generation(self, generation: Generation) -> None:
        """Count anew."""
        with self._lock:
            self._seconds = self._compiled_s = 0.0
            self._compiled = self._fetched = 0
            self._is_reported = False

    def end(self) -> None:
        """Let what the script does after training compile on this host alone, whatever became of the generation."""
        self.fetcher.end()

    def report_once(self) -> None:
        """Report what the generation's first step had to wait for; called at each commit, reports at the first."""
        with self._lock:
            if self._is_reported:
                return
            self._is_reported = True
            detail = {
                "seconds": self._seconds,
                "compiled": self._compiled,
                "compiled_s": self._compiled_s,
                "fetched": self._fetched,
            }
        self._record_event(EventKind.PROGRAMS_READY, **detail)

    # `CacheHooks`: called by JAX's cache.

    def fetch(self, key: str) -> bytes | None:
        """Return a program that another host has or compiles; None: compile it here."""
        found = self.fetcher.fetch(key)
        if is_compiling_ahead():
            return found
        if found is None:
            self._hit_failpoint(FailPoint.BEFORE_COMPILE)
        else:
            with self._lock:
                self._fetched += 1
        return found

    def finished(self) -> None:
        """Let the other hosts have the program that this thread compiled for them."""
        self.fetcher.finish()

    def missed(self, key: str, seconds: float) -> None:
        """Record that a program was compiled here."""
        if is_compiling_ahead():
            return
        with self._lock:
            self._compiled += 1
            self._compiled_s += seconds
        if seconds >= MIN_REPORTED_S:
            name, _, digest = key.rpartition("-")
            self._record_event(
                EventKind.COMPILE_CACHE_MISS, program=name, digest=digest[:DIGEST_CHARACTERS], seconds=seconds
            )

    # Called by the thread that compiles ahead.

    def record_compiled_ahead(self, world: str, seconds: float) -> None:
        """Record that the programs of a likely next world are compiled."""
        self._record_event(EventKind.PROGRAM_COMPILED_AHEAD, world=world, seconds=seconds)

    def record_failed_ahead(self, world: str, reason: str) -> None:
        """Record that the programs of a likely next world could not be compiled."""
        self._record_event(EventKind.PROGRAM_FAILED, world=world, reason=reason)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event in COMPILE_EVENTS and not is_compiling_ahead():
            with self._lock:
                self._seconds += duration_secs

    def _find_patience(self) -> Patience | None:
        if is_compiling_ahead():
            return Patience(is_ahead=True, check=check_canceled)
        # Training waits, and notices the end of its generation; a thread of the user's takes what is there.
        if is_training_thread():
            return Patience(is_ahead=False, check=self._raise_if_ended)
        return None

    def _on_failure(self, owner: HostName, reason: str) -> None:
        self._record_event(EventKind.PROGRAM_FAILED, owner=owner, reason=reason)


def open_program_directory() -> ProgramDirectory | None:
    """Return the directory of this host's compiled programs; None: JAX's cache is off."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return ProgramDirectory(Path(folder), CACHE_SUFFIX) if folder else None
