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
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from jax._src import cache_key, compiler, lru_cache
from jax._src.lib import xla_client

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
                f"{function.__qualname__} of this jax takes {found}, expected {expected}; compiled programs are "
                "not shared between processes, so re-forming compiles again"
            )
    cache_key.get = functools.partial(_key, cache_key.get)
    cache_key._hash_accelerator_config = functools.partial(
        _hash_accelerators, cache_key._hash_accelerator_config
    )
    compiler._cache_write = functools.partial(_write, compiler._cache_write)
    lru_cache.LRUCache.put = _put_atomically  # type: ignore[method-assign]
    _shared = True
    return None


def _is_local_cpu(devices: Any) -> bool:  # noqa: ANN401 - an array of devices
    flat = list(devices.flat)
    return flat[0].platform == "cpu" and len({device.process_index for device in flat}) == 1


def _key(original: Any, module: Any, devices: Any, compile_options: Any, *rest: Any, **more: Any) -> str:  # noqa: ANN401 - JAX's own
    if _is_local_cpu(devices) and compile_options.device_assignment is not None:
        assignment = compile_options.device_assignment
        shape = (assignment.replica_count(), assignment.computation_count())
        compile_options = copy.deepcopy(compile_options)
        compile_options.device_assignment = xla_client.DeviceAssignment.create(
            np.arange(shape[0] * shape[1]).reshape(shape)
        )
    return original(module, devices, compile_options, *rest, **more)


def _hash_accelerators(original: Any, hash_obj: Any, accelerators: Any) -> None:  # noqa: ANN401 - JAX's own
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
    original: Any, key: str, seconds: float, name: str, backend: Any, executable: Any, *rest: Any
) -> None:  # noqa: ANN401 - JAX's own
    """As JAX's own, by whatever process."""
    with _as_process_0():
        original(key, seconds, name, backend, executable, *rest)


@contextlib.contextmanager
def _as_process_0() -> Any:  # noqa: ANN401 - a context manager
    state = compiler.distributed.global_state
    index, state.process_id = state.process_id, 0
    try:
        yield
    finally:
        state.process_id = index


def _put_atomically(self: Any, key: str, value: bytes) -> None:  # noqa: ANN401 - JAX's LRUCache
    path = Path(str(self.path)) / f"{key}{lru_cache._CACHE_SUFFIX}"
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(value)
    temporary.replace(path)
