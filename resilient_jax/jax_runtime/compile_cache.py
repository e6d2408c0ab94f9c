"""A persistent compilation cache that every process writes and every process hits.

JAX's own cache is written by process 0 alone, and on CPU its key contains the device ids and a fingerprint of the
topology, so it misses whenever a world is re-formed or a worker rejoins under another index.
Here, on CPU:

- the key contains the number and kind of the devices, and which of them share a process, in place of their ids, and the
  processor's features, so that a machine never loads code for another;
- the program is loaded for the present devices: `deserialize_executable` takes the new device assignment. What was
  compiled for any three of four hosts serves any other three.

On other platforms the key is JAX's own. The path of the directory is in no key. Entries are written atomically (by a
rename), so a process that is killed while writing leaves none; several processes may share the directory. The directory
is bounded, to within what each process writes between two looks at it: the entries that were used longest ago are
evicted first. A missing entry may be fetched from another host.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import jax
import numpy as np
from jax._src import cache_key, compiler, lru_cache
from jax._src import distributed as jax_distributed
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

EXPECTED_SIGNATURES: Final = (
    (cache_key.get, ("module", "devices", "compile_options", "backend")),
    (cache_key._hash_accelerator_config, ("hash_obj", "accelerators")),
    (
        compiler._cache_write,
        ("cache_key", "compile_time_secs", "module_name", "backend", "executable"),
    ),
    (lru_cache.LRUCache.put, ("self", "key", "value")),
    (lru_cache.LRUCache.get, ("self", "key")),
)
"""The functions of JAX that are replaced, with the first parameters that they must have to be the known ones."""

Untyped: TypeAlias = Any
"""An object of JAX's or jaxlib's that has no usable type; the parameter is named after it."""

CACHE_SUFFIX: Final = lru_cache._CACHE_SUFFIX
ABANDONED_AFTER_S: Final = 3600.0
"""After this time a partly written file has been abandoned by its writer."""
WRITTEN_BETWEEN_LOOKS: Final = 64
"""The fraction of its limit that a process writes before it looks at the directory again, inverted."""
_shared = False
_thread_state = threading.local()


class CacheHooks(Protocol):
    """What the cache calls, on the thread that compiles."""

    def fetch(self, key: str) -> bytes | None:
        """Return an entry that is not in the directory, from another host; None: no host has it."""

    def missed(self, key: str, seconds: float) -> None:
        """Called when a program had to be compiled."""

    def finished(self) -> None:
        """Called when the thread has its program, fetched or compiled, or has failed."""


def share_compilation_cache(hooks: CacheHooks, limit_bytes: int) -> str | None:
    """Make JAX's persistent cache work for every process; once per process, before the first compilation.

    Args:
        hooks: what brings entries that are not in the directory, and hears of programs that were compiled.
        limit_bytes: how large the directory may become before its oldest entries are removed.

    Returns:
        None when it is on; else why not, for the caller's event: JAX's own cache then stays as it is.
    """
    global _shared
    if _shared:
        return None
    # All checks come before the first replacement: either all functions are replaced or none is.
    for function, expected in EXPECTED_SIGNATURES:
        found = tuple(inspect.signature(function).parameters)[: len(expected)]
        if found != expected:
            return (
                f"{function.__qualname__} of this jax takes {found}, expected {expected}; compiled programs "
                "are not shared between processes, so re-forming compiles again"
            )
    if getattr(compiler, "distributed", None) is not jax_distributed:
        return (
            "the compiler of this jax does not ask `distributed` which process it is in; compiled programs are not "
            "shared between processes, so re-forming compiles again"
        )
    cache_key.get = functools.partial(_key, cache_key.get)
    cache_key._hash_accelerator_config = functools.partial(
        _hash_accelerators, cache_key._hash_accelerator_config
    )
    setattr(compiler, "distributed", _DistributedForWriter())  # noqa: B010 - not exported, says its type
    compiler._cache_write = functools.partial(_write, compiler._cache_write, hooks)
    compiler.compile_or_get_cached = functools.partial(
        _compile_or_get_cached, compiler.compile_or_get_cached, hooks
    )
    own_put, own_get = lru_cache.LRUCache.put, lru_cache.LRUCache.get
    limit = DirectoryLimit(limit_bytes)

    def put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
        _put(own_put, self, key, value, limit)

    def get(self: lru_cache.LRUCache, key: str) -> bytes | None:
        value = own_get(self, key)
        if value is not None:
            _touch(self, key)
        elif (value := hooks.fetch(key)) is not None and not _has_entry(self, key):
            put(self, key, value)  # unless the host that has it shares the directory
        return value

    lru_cache.LRUCache.put = put
    lru_cache.LRUCache.get = get
    _shared = True
    return None


def has_portable_keys(device: Untyped) -> bool:
    """Return whether the key of a program for devices like this one does not depend on the ids of the devices."""
    return _shared and device.platform == "cpu"


def is_portable_cache_on(device: Untyped) -> bool:
    """Return whether a program that is compiled for devices like this one is cached, and found for other devices."""
    config: Untyped = jax.config
    is_kept = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir is not None
    return is_kept and has_portable_keys(device)


def _key(
    original: Untyped,
    module: Untyped,
    devices: Untyped,
    compile_options: Untyped,
    *rest: Untyped,
    **more: Untyped,
) -> str:
    # A copy, because the program is compiled with the options themselves, for the devices that they name.
    compile_options = copy.deepcopy(compile_options)
    # A folder inside of the cache's own, which JAX sets everywhere: in the key it would bind programs to a path.
    compile_options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir = ""
    if has_portable_keys(devices.flat[0]) and compile_options.device_assignment is not None:
        assignment = compile_options.device_assignment
        shape = (assignment.replica_count(), assignment.computation_count())
        # 0, 1, 2, ... in place of the ids. Which devices share a process is hashed in `_hash_accelerators`.
        compile_options.device_assignment = xla_client.DeviceAssignment.create(
            np.arange(shape[0] * shape[1]).reshape(shape)
        )
    return original(module, devices, compile_options, *rest, **more)


def _hash_accelerators(original: Untyped, hash_obj: Untyped, accelerators: Untyped) -> None:
    if not has_portable_keys(accelerators.flat[0]):
        original(hash_obj, accelerators)
        return
    # Numbered by their first appearance: hosts 0, 1, 3 give the same key as hosts 0, 1, 2.
    processes = list(dict.fromkeys(device.process_index for device in accelerators.flat))
    where = [(device.device_kind, processes.index(device.process_index)) for device in accelerators.flat]
    hash_obj.update(f"{where}; {_processor()}".encode())


@functools.cache
def _processor() -> str:
    """Return a digest of the features of this machine's processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(features).encode()).hexdigest()


def _compile_or_get_cached(
    original: Untyped, hooks: CacheHooks, *arguments: Untyped, **more: Untyped
) -> Untyped:
    try:
        return original(*arguments, **more)
    finally:
        hooks.finished()


def _write(
    original: Untyped,
    hooks: CacheHooks,
    key: str,
    seconds: float,
    name: str,
    backend: Untyped,
    executable: Untyped,
    *rest: Untyped,
) -> None:
    """Write as JAX does, but from any process."""
    hooks.missed(key, seconds)
    with _as_process_0():
        original(key, seconds, name, backend, executable, *rest)


class _StateForWriter:
    """JAX's `global_state` as its compiler sees it: a thread that writes to the cache sees process 0."""

    def __getattr__(self, name: str) -> Untyped:
        if name == "process_id" and getattr(_thread_state, "writes", False):
            return 0
        return getattr(jax_distributed.global_state, name)


class _DistributedForWriter:
    """JAX's module `distributed` with that state."""

    global_state: Final = _StateForWriter()

    def __getattr__(self, name: str) -> Untyped:
        return getattr(jax_distributed, name)


@contextlib.contextmanager
def _as_process_0() -> Iterator[None]:
    # For this thread only: all others must see the true index of the process.
    _thread_state.writes = True
    try:
        yield
    finally:
        _thread_state.writes = False


def _put(
    original: Callable[[Untyped, str, bytes], None],
    cache: Untyped,
    key: str,
    value: bytes,
    limit: "DirectoryLimit",
) -> None:
    """Write as JAX does, but atomically, and replace an entry that could not be read."""
    if cache.eviction_enabled or "://" in str(cache.path):
        original(
            cache, key, value
        )  # JAX writes under its lock, or to an object store, where a write is atomic
        return
    path = Path(str(cache.path)) / f"{key}{CACHE_SUFFIX}"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file under the name
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    limit.note_written(path.parent, len(value))


class DirectoryLimit:
    """Keeps the directory below its limit without looking at all entries for each one: of thousands that takes longer
    than to write one, and than to compile a small program.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # The first entry of a process is always followed by a look: an earlier process may have written the rest.
        self._unseen_bytes = limit_bytes
        self._lock = threading.Lock()

    def note_written(self, directory: Path, num_bytes: int) -> None:
        """Count what was written; evict entries when enough was since the last look."""
        with self._lock:
            self._unseen_bytes += num_bytes
            if self._unseen_bytes * WRITTEN_BETWEEN_LOOKS < self._limit_bytes:
                return
            self._unseen_bytes = 0
        evict_oldest(directory, self._limit_bytes)


def _has_entry(cache: Untyped, key: str) -> bool:
    return "://" not in str(cache.path) and (Path(str(cache.path)) / f"{key}{CACHE_SUFFIX}").exists()


def _touch(cache: Untyped, key: str) -> None:
    if "://" not in str(cache.path):
        with contextlib.suppress(
            OSError
        ):  # another process evicted it meanwhile, or the directory is read-only
            os.utime(Path(str(cache.path)) / f"{key}{CACHE_SUFFIX}")


def evict_oldest(directory: Path, limit_bytes: int) -> int:
    """Remove entries, those used longest ago first, until the rest fits; return how many. The newest entry stays.

    Files that were abandoned partly written are removed, too.
    """
    for path in directory.glob(f".*{CACHE_SUFFIX}.*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - ABANDONED_AFTER_S:
                path.unlink()
    entries = []
    for path in directory.glob(f"*{CACHE_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # evicted by another process
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    entries.sort()
    size = sum(entry[1] for entry in entries)
    evicted = 0
    for _, bytes_here, path in entries[:-1]:
        if size <= limit_bytes:
            break
        path.unlink(missing_ok=True)
        size -= bytes_here
        evicted += 1
    return evicted
