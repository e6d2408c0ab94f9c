"""Which boxes of which leaf each host keeps or writes in its part: every element of the state exactly once.

A shard that R hosts have is cut into R boxes of nearly equal size, one for each of these hosts. The partition follows
from shapes, dtypes and shardings, so every host computes the same one.
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
from resilient_jax.sharding.holder_sharding import find_holders_of
from resilient_jax.snapshot.manifest import LeafSlice, align_slice
from resilient_jax.state.flat_state import FlatLeaf
from resilient_jax.state.index_box import IndexBox, box_from_index, intersect_boxes, split_box, whole_box

HostOf = Callable[[Device], HostName]
BoxHolders = Mapping[IndexBox, tuple[HostName, ...]]
"""The boxes of a leaf, which are disjoint and cover the leaf, and the hosts that have each box."""


HoldersCache = dict[tuple[Sharding, tuple[int, ...], tuple[int, ...]], BoxHolders]
"""By sharding, shape and stored shape, which many leaves share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePartition:
    """The partition of all states of one structure into the parts of hosts.

    Attributes:
        slices: slices of each host's part, in order of their offsets.
        replicated_on: hosts that have every element of every leaf.
    """

    leaves: tuple[LeafSpec, ...]
    slices: Mapping[HostName, tuple[LeafSlice, ...]]
    part_bytes: Mapping[HostName, int]
    replicated_on: tuple[HostName, ...]


def partition_state(
    leaves: Sequence[FlatLeaf], host_of: HostOf, hosts: Sequence[HostName], *, is_coarse: bool = False
) -> StatePartition:
    """Return the parts of all hosts, of equal size (to within one row of a leaf) where hosts have the same shards.

    A leaf in host memory, or on the devices of one host only, is assumed to be the same on every host, as it is when
    each host computes the state by itself; unless its sharding says that this host alone holds it.

    Args:
        leaves: leaves of a state; only their shapes, dtypes and shardings are read, not their values.
        hosts: all hosts of the generation, in the same order on each.
        is_coarse: as in `split_box`, for storage: then sizes differ by a thirty-second, and by small leaves.

    Raises:
        StateError: a leaf is on a device of a host that is not among `hosts`.
    """
    known: HoldersCache = {}
    loads = dict.fromkeys(hosts, 0)
    pieces: dict[HostName, list[LeafSlice]] = {host: [] for host in hosts}
    complete_on = set(hosts)
    for number, leaf in enumerate(leaves):
        holdings = _find_holdings(leaf, host_of, hosts, known)
        itemsize = leaf.value.dtype.itemsize
        for box, holders in holdings.items():
            # The least loaded hosts get the larger boxes: loads of hosts with equal shards stay within one row.
            by_load = sorted(holders, key=loads.__getitem__)
            boxes = split_box(box, len(holders), itemsize, is_coarse=is_coarse) if box.size else []
            # Not strict: a box with fewer rows than holders makes fewer boxes,
            # and the hosts with the greatest load get none.
            for host, (start, stop) in zip(by_load, boxes, strict=False):
                pieces[host].append(LeafSlice(number, start, stop, loads[host]))
                loads[host] += align_slice(IndexBox(start, stop).size * itemsize)
        complete_on.intersection_update(*map(set, holdings.values()))
    return StatePartition(
        leaves=tuple(leaf.spec for leaf in leaves),
        slices={host: tuple(pieces[host]) for host in hosts},
        part_bytes=loads,
        replicated_on=tuple(host for host in hosts if host in complete_on),
    )


def check_same_structure(partition: StatePartition, leaves: Sequence[FlatLeaf]) -> None:
    """Check that a state has the structure that the partition was made for.

    Raises:
        StateError: a leaf differs; the message names the first.
    """
    for leaf, expected in itertools.zip_longest(leaves, partition.leaves):
        if leaf is None or expected is None or not _is_like(leaf, expected):
            found = None if leaf is None else leaf.spec
            raise StateError(
                f"the state changed its structure between snapshots: found {_say(found)}, expected {_say(expected)}. "
                "Keep shapes, dtypes, kinds and tree the same from step to step; what grows belongs outside of it"
            )


def _is_like(leaf: FlatLeaf, info: LeafSpec) -> bool:
    """Compare without making a spec: one microsecond instead of four for each leaf, while training waits."""
    value = leaf.value
    is_same = (leaf.path, leaf.shape, leaf.key_impl) == (info.path, info.shape, info.key_impl)
    return is_same and value.dtype == info.dtype and leaf.kind is info.kind


def _find_holdings(
    leaf: FlatLeaf, host_of: HostOf, hosts: Sequence[HostName], known: HoldersCache
) -> BoxHolders:
    if isinstance(leaf.value, np.ndarray):
        return {whole_box(leaf.value.shape): tuple(hosts)}
    key = (leaf.value.sharding, leaf.value.shape, leaf.stored_shape)
    if key not in known:
        known[key] = _holdings_of(leaf, leaf.value, host_of, hosts)
    return known[key]


def _holdings_of(leaf: FlatLeaf, value: jax.Array, host_of: HostOf, hosts: Sequence[HostName]) -> BoxHolders:
    stored = whole_box(leaf.stored_shape)
    if (known := find_holders_of(value.sharding)) is not None:
        # How many devices each of them has makes no difference.
        _check_live(leaf, set(known.hosts), hosts)
        return {stored: tuple(host for host in hosts if host in known.hosts)}
    holders: dict[IndexBox, set[HostName]] = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        box = stored if index is None else box_from_index(index, value.shape)
        holders.setdefault(box, set()).add(host_of(device))
    found = set[HostName]().union(*holders.values())
    _check_live(leaf, found, hosts)
    if len(found) == 1:
        return {stored: tuple(hosts)}
    if leaf.raveled_shape is not None:
        # Padding is in no part, so a snapshot does not depend on the number of devices.
        holders = {
            kept: of for box, of in holders.items() if (kept := intersect_boxes(box, stored)) is not None
        }
    # Hosts and boxes in an order that is the same everywhere: offsets and loads follow from it.
    return {box: tuple(host for host in hosts if host in holders[box]) for box in sorted(holders)}


def _check_live(leaf: FlatLeaf, found: set[HostName], hosts: Sequence[HostName]) -> None:
    if not found <= set(hosts):
        raise StateError(
            f"the state's leaf {leaf.path} is on devices of {sorted(found - set(hosts))}, expected only live hosts: "
            f"{list(hosts)}. Place the state on world.mesh(...) of this generation"
        )


def _say(info: LeafSpec | None) -> str:
    return "no leaf" if info is None else f"{info.path} of {info}"
