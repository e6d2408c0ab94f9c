"""Which boxes of which leaf each host keeps in its part: every number of the state exactly once.

A shard that R hosts hold is cut into R boxes of nearly equal size, one for each. Everything follows from shapes,
dtypes and shardings, so that every host computes the same for all.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding

from resilient_jax.errors import StateError
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.snapshot.manifest import SLICE_ALIGNMENT, LeafSlice
from resilient_jax.state.flat_state import FlatLeaf
from resilient_jax.state.index_box import IndexBox, box_from_index, split_box, whole_box

HostOf = Callable[[Device], HostName]
BoxHolders = Mapping[IndexBox, tuple[HostName, ...]]
"""The boxes of a leaf, which are disjoint and cover it, and who holds each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePartition:
    """A state of this structure in parts.

    Attributes:
        leaves: every leaf of the state.
        pieces: of each host's part, in order of their offsets.
        part_bytes: length of each host's part.
        complete_on: hosts that hold every leaf whole.
    """

    leaves: tuple[LeafSpec, ...]
    slices: Mapping[HostName, tuple[LeafSlice, ...]]
    part_bytes: Mapping[HostName, int]
    replicated_on: tuple[HostName, ...]


def partition_state(leaves: Sequence[FlatLeaf], host_of: HostOf, hosts: Sequence[HostName]) -> StatePartition:
    """The parts of all hosts, of equal size (to within one row of a leaf) where all hold the same.

    A leaf in host memory, or on the devices of one host only, is taken to be the same on every host, as a state is that
    each host computes for itself.

    Args:
        leaves: of a state; of their values only shape, dtype and sharding are read.
        host_of: whose device it is.
        hosts: all hosts of the generation, in the same order on each.

    Raises:
        StateError: a leaf lies on a device of a host that is not among `hosts`.
    """
    known: dict[tuple[Sharding, tuple[int, ...]], BoxHolders] = {}  # many leaves share a sharding and a shape
    loads = dict.fromkeys(hosts, 0)
    pieces: dict[HostName, list[LeafSlice]] = {host: [] for host in hosts}
    complete_on = set(hosts)
    for number, leaf in enumerate(leaves):
        holdings = _find_holdings(leaf, host_of, hosts, known)
        itemsize = leaf.value.dtype.itemsize
        for box, holders in holdings.items():
            # Who has least so far takes the larger boxes. That keeps the loads of equal holders within one row.
            by_load = sorted(holders, key=loads.__getitem__)
            boxes = split_box(box, len(holders), itemsize) if box.size else []
            for host, (start, stop) in zip(by_load, boxes, strict=False):
                pieces[host].append(LeafSlice(number, start, stop, loads[host]))
                loads[host] += _aligned(IndexBox(start, stop).size * itemsize)
        complete_on.intersection_update(*map(set, holdings.values()))
    return StatePartition(
        leaves=tuple(leaf.spec for leaf in leaves),
        slices={host: tuple(pieces[host]) for host in hosts},
        part_bytes=loads,
        replicated_on=tuple(host for host in hosts if host in complete_on),
    )


def check_same_structure(partition: StatePartition, leaves: Sequence[FlatLeaf]) -> None:
    """Refuses a state of another structure than the one that was cut.

    Raises:
        StateError: names the first leaf that differs.
    """
    for leaf, expected in itertools.zip_longest(leaves, partition.leaves):
        if leaf is None or expected is None or not _is_like(leaf, expected):
            found = None if leaf is None else leaf.spec
            raise StateError(
                f"the state changed its structure between snapshots: found {_say(found)}, expected {_say(expected)}. "
                "Keep shapes, dtypes and tree the same from step to step; what grows belongs outside of the state"
            )


def _is_like(leaf: FlatLeaf, info: LeafSpec) -> bool:
    """A microsecond; to describe a leaf takes four, and training waits meanwhile."""
    value = leaf.value
    return (leaf.path, value.shape, leaf.key_impl) == (
        info.path,
        info.shape,
        info.key_impl,
    ) and value.dtype == info.dtype


def _find_holdings(
    leaf: FlatLeaf,
    host_of: HostOf,
    hosts: Sequence[HostName],
    known: dict[tuple[Sharding, tuple[int, ...]], BoxHolders],
) -> BoxHolders:
    shape = leaf.value.shape
    if isinstance(leaf.value, np.ndarray):
        return {whole_box(shape): tuple(hosts)}
    key = (leaf.value.sharding, shape)
    if key not in known:
        known[key] = _holdings_of(leaf.path, leaf.value, host_of, hosts)
    return known[key]


def _holdings_of(path: str, value: jax.Array, host_of: HostOf, hosts: Sequence[HostName]) -> BoxHolders:
    holders: dict[IndexBox, set[HostName]] = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        box = whole_box(value.shape) if index is None else box_from_index(index, value.shape)
        holders.setdefault(box, set()).add(host_of(device))
    found = set[HostName]().union(*holders.values())
    if not found <= set(hosts):
        raise StateError(
            f"the state's leaf {path} lies on devices of {sorted(found - set(hosts))}, expected only live hosts: "
            f"{list(hosts)}. Place the state on world.mesh(...) of this generation"
        )
    if len(found) == 1:
        return {whole_box(value.shape): tuple(hosts)}
    return {box: tuple(host for host in hosts if host in holders[box]) for box in sorted(holders)}


def _say(info: LeafSpec | None) -> str:
    return "no leaf" if info is None else f"{info.path} of {info}"


def _aligned(size: int) -> int:
    return -(-size // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
