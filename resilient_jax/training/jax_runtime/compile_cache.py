"""A persistent compilation cache that every process writes and every process hits.

JAX's own is written by process 0 alone, and on CPU its key contains the device ids and a fingerprint of the
whole topology, so it misses whenever a world is re-formed or a worker comes back under another index
(jax_facts 12). Here, for programs on devices of one process only:

- the key holds the number and kind of the devices in place of their ids, and the processor's features, so
  that a machine never loads code for another;
- the program is loaded for the devices of now: `deserialize_executable` takes the new device assignment.

Programs that span processes keep JAX's own key: they hit in a world of the same shape only. Entries appear
whole or not at all (a rename), whoever is killed while writing; several processes may share the folder.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from jax._src import cache_key, compiler, lru_cache
from jax._src import distributed as jax_distributed
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

EXPECTED_PARAMETERS: Final = (
    (cache_key.get, ("module", "devices", "compile_options", "backend")),
    (cache_key._hash_accelerator_config, ("hash_obj", "accelerators")),
    (
        compiler._cache_write,
        ("cache_key", "compile_time_secs", "module_name", "backend", "executable"),
    ),
    (lru_cache.LRUCache.put, ("self", "key", "value")),
)
"""What is replaced, and how it must begin to be what this was written for."""

Untyped: TypeAlias = Any
"""An object of JAX's or jaxlib's that has no usable type; the parameter's name says which."""

_shared = False


def share_compilation_cache() -> str | None:
    """Makes JAX's persistent cache work for every process; once per process, before the first compilation.

    Returns:
        None when it is on; else why not, for the caller's event: JAX's own cache then stays as it is.
    """
    global _shared
    if _shared:
        return None
    for function, expected in EXPECTED_PARAMETERS:
        found = tuple(inspect.signature(function).parameters)[: len(expected)]
        if found != expected:
            return (
                f"{function.__qualname__} of this jax takes {found}, expected {expected}; compiled programs "
                "are not shared between processes, so re-forming compiles again"
            )
    cache_key.get = functools.partial(_key, cache_key.get)
    cache_key._hash_accelerator_config = functools.partial(
        _hash_accelerators, cache_key._hash_accelerator_config
    )
    compiler._cache_write = functools.partial(_write, compiler._cache_write)
    own_put = lru_cache.LRUCache.put

    def put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
        _put(own_put, self, key, value)

    lru_cache.LRUCache.put = put
    _shared = True
    return None


def _is_local_cpu(devices: Untyped) -> bool:
    flat = list(devices.flat)
    return flat[0].platform == "cpu" and len({device.process_index for device in flat}) == 1


def _key(
    original: Untyped,
    module: Untyped,
    devices: Untyped,
    compile_options: Untyped,
    *rest: Untyped,
    **more: Untyped,
) -> str:
    if _is_local_cpu(devices) and compile_options.device_assignment is not None:
        assignment = compile_options.device_assignment
        shape = (assignment.replica_count(), assignment.computation_count())
        compile_options = copy.deepcopy(compile_options)
        compile_options.device_assignment = xla_client.DeviceAssignment.create(
            np.arange(shape[0] * shape[1]).reshape(shape)
        )
    return original(module, devices, compile_options, *rest, **more)


def _hash_accelerators(original: Untyped, hash_obj: Untyped, accelerators: Untyped) -> None:
    if not _is_local_cpu(accelerators):
        original(hash_obj, accelerators)
        return
    kinds = ",".join(device.device_kind for device in accelerators.flat)
    hash_obj.update(f"one process: {kinds}; {_processor()}".encode())


@functools.cache
def _processor() -> str:
    """What this machine's processors can do, as a digest."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(features).encode()).hexdigest()


def _write(
    original: Untyped,
    key: str,
    seconds: float,
    name: str,
    backend: Untyped,
    executable: Untyped,
    *rest: Untyped,
) -> None:
    """As JAX's own, by whatever process."""
    with _as_process_0():
        original(key, seconds, name, backend, executable, *rest)


@contextlib.contextmanager
def _as_process_0() -> Iterator[None]:
    state = jax_distributed.global_state
    index, state.process_id = state.process_id, 0
    try:
        yield
    finally:
        state.process_id = index


def _put(original: Callable[[Untyped, str, bytes], None], cache: Untyped, key: str, value: bytes) -> None:
    """As JAX's own, but the entry appears whole or not at all."""
    if cache.eviction_enabled or "://" in str(cache.path):
        original(cache, key, value)  # under its lock, or on an object store, where a write is atomic
        return
    path = Path(str(cache.path)) / f"{key}{lru_cache._CACHE_SUFFIX}"
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(value)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
