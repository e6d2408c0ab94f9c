"""Writes what this worker committed, with digests of the state, where a controller asked for it (`protocol.ledger`).

The sum is an additive digest: each number's bits are mixed with its place in the state, and the mixtures are added. So
parts of a state can be digested on different hosts and added up, whatever the mesh: the same state gives the same sum
on one host and on eight. It tells of damage and of mistakes, not of an attacker.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from resilient_jax.protocol.ledger import (
    ENTRY_ENCODER,
    LEDGER_VARIABLE,
    LedgerEntry,
    MicrobatchEntry,
    RestoreEntry,
    StepEntry,
)
from resilient_jax.state.flat_state import FlatLeaf, FlatState, assemble_array

LANE_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Odd numbers, one for each half of the sum: the golden ratio, and the second prime of xxHash64."""
WORD_MODULUS: Final = 2**64


class Ledger:
    """One worker's lines."""

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
        """None unless a controller asked for it."""
        directory = os.environ.get(LEDGER_VARIABLE)
        return cls(Path(directory), host) if directory else None

    def record_commit(
        self,
        held: FlatState,
        generation: int,
        hosts: int,
        owners: Mapping[str, Sequence[str]],
        *,
        is_first: bool,
    ) -> None:
        """`held` is the committed state now. `is_first`: of the hosts; it answers for what each has for itself."""
        self._write(
            StepEntry(
                host=self._host,
                pid=os.getpid(),
                generation=generation,
                step=held.step - 1,
                num_hosts=hosts,
                monotonic_s=time.monotonic(),
                state_sha256=compute_sha256(held),
                additive_digest=compute_additive_digest(held, is_first=is_first),
                owners={name: tuple(hosts_of) for name, hosts_of in owners.items()},
            )
        )

    def record_restore(self, held: FlatState, generation: int, hosts: int, *, is_first: bool) -> None:
        """`held` is what this host goes on from."""
        self._write(
            RestoreEntry(
                host=self._host,
                pid=os.getpid(),
                generation=generation,
                num_steps=held.step,
                num_hosts=hosts,
                monotonic_s=time.monotonic(),
                state_sha256=compute_sha256(held),
                additive_digest=compute_additive_digest(held, is_first=is_first),
            )
        )

    def record_microbatch(self, step: int, index: int, generation: int) -> None:
        """A microbatch is about to be computed."""
        self._write(
            MicrobatchEntry(host=self._host, pid=os.getpid(), generation=generation, step=step, index=index)
        )

    def _write(self, line: LedgerEntry) -> None:
        os.write(self._descriptor, ENTRY_ENCODER.encode(line) + b"\n")


def compute_sha256(held: FlatState) -> str:
    """SHA-256 of all leaves with their names and types; empty if this host has not all of the state."""
    if not held.is_complete:
        return ""
    found = hashlib.sha256()
    for leaf in held.leaves:
        found.update(_name_of(leaf))
        found.update(_whole(leaf.value).tobytes())
    return found.hexdigest()


def compute_additive_digest(held: FlatState, *, is_first: bool) -> str:
    """The additive digest of this host's part; of all of the state, where the host has all of it."""
    total = [0] * len(LANE_MULTIPLIERS)
    for leaf in held.leaves:
        seed = zlib.crc32(_name_of(leaf))
        for start, data in _parts(leaf.value, held.is_complete, is_first):
            for lane, mixed in enumerate(_mix(data, start, leaf.value.shape, seed)):
                total[lane] = (total[lane] + mixed) % WORD_MODULUS
    return f"{total[0]:016x}{total[1]:016x}"


def _name_of(leaf: FlatLeaf) -> bytes:
    return f"{leaf.path} {leaf.value.dtype} {leaf.value.shape} {leaf.key_impl}".encode()


def _whole(value: Any) -> np.ndarray:  # noqa: ANN401 - a jax or numpy array
    if isinstance(value, np.ndarray) or value.is_fully_addressable:
        return np.asarray(value, order="C")
    if value.is_fully_replicated:
        return np.asarray(value.addressable_data(0), order="C")
    return assemble_array("", value)


def _parts(
    value: Any,  # noqa: ANN401 - a jax or numpy array
    is_complete: bool,
    is_first: bool,
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Where each part of an array begins that this host answers for, and its numbers."""
    if isinstance(value, np.ndarray) or is_complete or value.is_fully_addressable:
        whole = _whole(value)
        return [((0,) * whole.ndim, whole)] if is_complete or is_first else []
    return [
        (tuple(cut.start or 0 for cut in shard.index), np.asarray(shard.data, order="C"))
        for shard in value.addressable_shards
        if shard.replica_id == 0
    ]


def _mix(data: np.ndarray, start: Sequence[int], shape: Sequence[int], seed: int) -> list[int]:
    """For each lane the sum over numbers of a mixture of bits, place and seed (the finaliser of SplitMix64)."""
    bits = data.reshape(-1).view(f"u{data.dtype.itemsize}") if data.dtype.itemsize in (1, 2, 4, 8) else None
    if bits is None:
        raise TypeError(f"numbers of {data.dtype.itemsize} bytes ({data.dtype}) cannot be digested")
    places = np.zeros(data.shape, np.uint64)
    stride = 1
    for axis in reversed(range(data.ndim)):
        along = (np.arange(data.shape[axis], dtype=np.uint64) + np.uint64(start[axis])) * np.uint64(stride)
        places += along.reshape([-1 if a == axis else 1 for a in range(data.ndim)])
        stride *= shape[axis]
    sums = []
    for lane in LANE_MULTIPLIERS:
        x = places.reshape(-1) * np.uint64(lane) + np.uint64(seed)
        x ^= bits.astype(np.uint64) * np.uint64(lane ^ 0x5851F42D4C957F2D | 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        sums.append(int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64)))
    return sums
