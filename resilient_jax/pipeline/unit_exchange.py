"""Units go from hosts that have them to hosts that want them.

Where hosts are lost or come, blocks move to others. For a result that is to be gathered, every host wants all of the
model, which must then fit its memory.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.box_reads import BoxGatherer, ReadTarget, choose_source
from resilient_jax.state.flat_state import FlatLeaf
from resilient_jax.state.host_shards import copy_held_boxes
from resilient_jax.state.index_box import whole_box
from resilient_jax.state.peer_transfer import StateExchange

Tree = Any
"""The state of a unit, or another pytree of arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitMove:
    """A unit goes from a host that has it to one that wants it."""

    unit: int
    sender: HostName
    receiver: HostName


def plan_moves(
    holders: Sequence[Collection[HostName]], wanted: Mapping[HostName, Collection[int]]
) -> tuple[UnitMove, ...]:
    """Return which host sends each unit to which: hosts that have the same units send as many of them.

    Args:
        holders: the hosts that have each unit.
        wanted: what each host wants, its own units included.

    Raises:
        PeerUnreachable: nobody has a unit.
    """
    moves: list[UnitMove] = []
    loads = Counter[HostName]()
    for unit, having in enumerate(holders):
        receivers = sorted(host for host, units in wanted.items() if unit in units and host not in having)
        if receivers and not having:
            raise PeerUnreachable(f"unit {unit}: no host that is left has it; a snapshot may")
        for receiver in receivers:
            sender = choose_source(sorted(having), receiver, loads)
            loads[sender] += 1
            moves.append(UnitMove(unit=unit, sender=sender, receiver=receiver))
    return tuple(moves)


def exchange_units(
    exchange: StateExchange,
    holders: Sequence[Collection[HostName]],
    wanted: Mapping[HostName, Collection[int]],
    held: Mapping[int, Tree],
    shapes: Sequence[Tree],
) -> dict[int, Tree]:
    """Return the units that this host wants: as they are where it has them, else as numpy arrays.

    Every host must call this, with the same arguments but for `held`. What this host offers stays offered until it is
    withdrawn, which must not be before all hosts have returned.

    Args:
        holders: the hosts that have each unit.
        wanted: what each host wants, its own units included.
        held: unit number to state, of the units of this host.
        shapes: shapes of the state of each unit, by number.

    Raises:
        PeerUnreachable: a host is lost, or late; or nobody has a unit.
    """
    moves, own = plan_moves(holders, wanted), exchange.own
    ends = [0, *itertools.accumulate(len(jax.tree.leaves(shape)) for shape in shapes)]
    """Index of the first leaf of each unit."""
    specs = [
        LeafSpec(f"unit {unit}, array {place}", np.dtype(leaf.dtype).name, tuple(leaf.shape))
        for unit, shape in enumerate(shapes)
        for place, leaf in enumerate(jax.tree.leaves(shape))
    ]
    if sent := sorted({move.unit for move in moves if move.sender == own}):
        boxes = (
            (ends[unit] + place, box, array)
            for unit in sent
            for place, leaf in enumerate(jax.tree.leaves(held[unit]))
            for box, array in copy_held_boxes(FlatLeaf(path="", value=leaf)).items()
        )
        exchange.offer(specs, boxes)
    found = {unit: held[unit] for unit in wanted[own] if own in holders[unit]}
    mine = [move for move in moves if move.receiver == own]
    targets: list[ReadTarget] = []
    for move in mine:
        leaves, structure = jax.tree.flatten(shapes[move.unit])
        arrays = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        targets += [
            ReadTarget(number, whole_box(array.shape), array)
            for number, array in enumerate(arrays, ends[move.unit])
        ]
        found[move.unit] = structure.unflatten(arrays)
    if targets:
        with exchange.open_reader(sorted({move.sender for move in mine})) as reader:
            BoxGatherer(reader).gather(targets)
    return dict(sorted(found.items()))
