"""Records what this worker committed, with digests of the state, where a controller asked for it (`protocol.ledger`).

The additive digest is a sum over elements: the bits of each are mixed with its index in the state, and the mixtures are
added modulo 2^64, in two lanes. So the shards of a state can be digested on different hosts and added: the same state
gives the same digest on any mesh. It detects damage and mistakes, not an attacker.
"""

import hashlib
import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.ledger import (
    ENTRY_ENCODER,
    LEDGER_VARIABLE,
    LedgerEntry,
    MicrobatchEntry,
    RestoreEntry,
    StepEntry,
)
from resilient_jax.sharding.holder_sharding import find_holders_of
from resilient_jax.sharding.placements import REPLICA_AXIS
from resilient_jax.state.array_digest import add_array
from resilient_jax.state.flat_state import FlatLeaf, FlatState, assemble_array
from resilient_jax.step.replicas import is_on_replicas

LANE_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Odd numbers, one for each half of the digest: the golden ratio, and the second prime of xxHash64."""
WORD_MODULUS: Final = 2**64


class Ledger:
    """Appends entries to one worker's file."""

    def __init__(self, directory: Path, host: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._host = host
        self._descriptor = os.open(
            directory / f"{host}-{os.getpid()}.jsonl",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )

    @classmethod
    def from_environment(cls, host: str) -> "Ledger | None":
        """Return a ledger if a controller asked for one by the environment, else None."""
        directory = os.environ.get(LEDGER_VARIABLE)
        return cls(Path(directory), host) if directory else None

    def record_commit(
        self,
        state: FlatState,
        generation: int,
        hosts: int,
        owners: Mapping[str, Sequence[str]],
        *,
        is_first: bool,
    ) -> None:
        """Record a commit. The first host, `is_first`, also digests the leaves that every host has for itself.

        Where the state is that of a replica of several hosts, the replica's first host does.
        """
        replica = find_replica(state)
        self._write(
            StepEntry(
                host=self._host,
                pid=os.getpid(),
                generation=generation,
                step=state.step - 1,
                num_hosts=hosts,
                replica=replica,
                monotonic_s=time.monotonic(),
                state_sha256=compute_sha256(state),
                additive_digest=compute_additive_digest(state, is_first=_is_first_of(replica, is_first)),
                owners={name: tuple(hosts_of) for name, hosts_of in owners.items()},
            )
        )

    def record_restore(self, state: FlatState, generation: int, hosts: int, *, is_first: bool) -> None:
        """Record the state that this host resumes from."""
        replica = find_replica(state)
        self._write(
            RestoreEntry(
                host=self._host,
                pid=os.getpid(),
                generation=generation,
                num_steps=state.step,
                num_hosts=hosts,
                replica=replica,
                monotonic_s=time.monotonic(),
                state_sha256=compute_sha256(state),
                additive_digest=compute_additive_digest(state, is_first=_is_first_of(replica, is_first)),
            )
        )

    def record_microbatch(self, step: int, index: int, generation: int) -> None:
        """Record that a microbatch is about to be computed."""
        self._write(
            MicrobatchEntry(host=self._host, pid=os.getpid(), generation=generation, step=step, index=index)
        )

    def _write(self, line: LedgerEntry) -> None:
        os.write(self._descriptor, ENTRY_ENCODER.encode(line) + b"\n")


def find_replica(state: FlatState) -> tuple[int, ...]:
    """Return JAX's processes whose hosts have a state between them; empty if each has all, or as holders have it."""
    found: set[int] = set()
    for leaf in state.leaves:
        value = leaf.value
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            continue
        if find_holders_of(value.sharding) is None:
            found |= {device.process_index for device in _list_replica_devices(value)}
    # A host that no replica has, has nothing of it.
    return tuple(sorted(found)) if jax.process_index() in found and not state.is_complete else ()


def _list_replica_devices(value: jax.Array) -> list[Device]:
    """Return the devices that have an array between them: those of this host's replica, or of all hosts."""
    if not is_on_replicas(value):
        return sorted(value.sharding.device_set, key=lambda device: device.id)
    assert isinstance(value.sharding, NamedSharding)
    mesh = value.sharding.mesh
    by_replica = np.moveaxis(np.asarray(mesh.devices), mesh.axis_names.index(REPLICA_AXIS), 0)
    rows = [list(row.flat) for row in by_replica]
    own = jax.process_index()
    return next((row for row in rows if any(device.process_index == own for device in row)), [])


def _is_first_of(replica: tuple[int, ...], is_first: bool) -> bool:
    return replica[0] == jax.process_index() if replica else is_first


def compute_sha256(state: FlatState) -> str:
    """Return the SHA-256 of all leaves with their names and dtypes; empty if this host has not all of the state."""
    if not state.is_complete:
        return ""
    found = hashlib.sha256()
    for leaf in state.leaves:
        elements = _to_numpy(leaf.value).reshape(-1)[: math.prod(leaf.shape)]  # without padding
        add_array(found, f"{leaf.path} {leaf.key_impl}", elements.reshape(leaf.shape))
    return found.hexdigest()


def compute_additive_digest(state: FlatState, *, is_first: bool) -> str:
    """Return the additive digest of this host's shards; of all of the state, where the host has all of it."""
    total = [0] * len(LANE_MULTIPLIERS)
    for leaf in state.leaves:
        seed = zlib.crc32(_leaf_name(leaf))
        for start, data in _list_own_shards(leaf.value, state.is_complete, is_first):
            if leaf.raveled_shape is not None:
                data = data[: max(0, math.prod(leaf.shape) - start[0])]  # without padding
            for lane, mixed in enumerate(_mix(data, start, leaf.value.shape, seed)):
                total[lane] = (total[lane] + mixed) % WORD_MODULUS
    return f"{total[0]:016x}{total[1]:016x}"


def _leaf_name(leaf: FlatLeaf) -> bytes:
    return f"{leaf.path} {leaf.value.dtype} {leaf.shape} {leaf.key_impl}".encode()


def _to_numpy(value: Any) -> np.ndarray:  # noqa: ANN401 - a jax or numpy array
    if isinstance(value, np.ndarray) or value.is_fully_addressable:
        return np.asarray(value, order="C")
    if value.is_fully_replicated:
        return np.asarray(value.addressable_data(0), order="C")
    return assemble_array("", value)


def _list_own_shards(
    value: Any,  # noqa: ANN401 - a jax or numpy array
    is_complete: bool,
    is_first: bool,
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return the start index and the elements of each shard that this host digests."""
    holders = find_holders_of(value.sharding) if isinstance(value, jax.Array) else None
    if holders is not None and not is_complete:
        # Each of them has all of it: the sum over hosts has each element once.
        is_digested = bool(value.addressable_shards) and holders.host == holders.hosts[0]
        return [((0,) * value.ndim, _to_numpy(value))] if is_digested else []
    if isinstance(value, np.ndarray) or is_complete or value.is_fully_addressable:
        array = _to_numpy(value)
        return [((0,) * array.ndim, array)] if is_complete or is_first else []
    # Of equal shards only one is digested, on whichever host that is: the sum over hosts has each element once.
    places = value.sharding.devices_indices_map(value.shape)
    firsts: dict[str, Device] = {}
    for device in _list_replica_devices(value):
        firsts.setdefault(str(places[device]), device)
    return [
        (tuple(cut.start or 0 for cut in shard.index), np.asarray(shard.data, order="C"))
        for shard in value.addressable_shards
        if firsts.get(str(shard.index)) == shard.device
    ]


def _mix(data: np.ndarray, start: Sequence[int], shape: Sequence[int], seed: int) -> list[int]:
    """Return, for each lane, the sum over elements of their mixture with index and seed.

    x = (index * lane + seed) ^ (bits * (lane ^ c | 1)), then the finalizer of SplitMix64
    (Steele, Lea, Flood 2014): x ^= x >> 30; x *= m1; x ^= x >> 27; x *= m2; x ^= x >> 31.
    """
    bits = data.reshape(-1).view(f"u{data.dtype.itemsize}") if data.dtype.itemsize in (1, 2, 4, 8) else None
    if bits is None:
        raise TypeError(f"elements of {data.dtype.itemsize} bytes ({data.dtype}) cannot be digested")
    # Of each element its index in the complete array, in C order: sum over axes of (start + position) x stride.
    indexes = np.zeros(data.shape, np.uint64)
    stride = 1
    for axis in reversed(range(data.ndim)):
        along = (np.arange(data.shape[axis], dtype=np.uint64) + np.uint64(start[axis])) * np.uint64(stride)
        indexes += along.reshape([-1 if a == axis else 1 for a in range(data.ndim)])
        stride *= shape[axis]
    sums = []
    for lane in LANE_MULTIPLIERS:
        x = indexes.reshape(-1) * np.uint64(lane) + np.uint64(seed)
        x ^= bits.astype(np.uint64) * np.uint64(lane ^ 0x5851F42D4C957F2D | 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        sums.append(int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64)))
    return sums
