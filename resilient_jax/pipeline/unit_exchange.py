"""Units go from hosts that have them to hosts that want them.

Where hosts are lost or come, blocks move to others. For a result that is to be gathered, every host wants all of the
model, which must then fit its memory.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import jax

from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import HostName
from resilient_jax.pipeline.array_packing import pack_arrays
from resilient_jax.pipeline.step_mail import StepMail
from resilient_jax.transport.mail_protocol import MailKind

STATE_MAIL: Final = MailKind("state")
"""Weights and optimizer state, for a host that holds them from now on, or puts the whole model together."""

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
    """Return which host sends each unit to which: the holders of a unit take turns in sending it.

    Args:
        holders: the hosts that have each unit.
        wanted: what each host wants, its own units included.

    Raises:
        PeerUnreachable: nobody has a unit.
    """
    moves: list[UnitMove] = []
    for unit, having in enumerate(holders):
        receivers = sorted(host for host, units in wanted.items() if unit in units and host not in having)
        if receivers and not having:
            raise PeerUnreachable(f"unit {unit}: no host that is left has it; a snapshot may")
        senders = sorted(having)
        moves += [
            UnitMove(unit=unit, sender=senders[turn % len(senders)], receiver=receiver)
            for turn, receiver in enumerate(receivers, unit)
        ]
    return tuple(moves)


def exchange_units(
    mail: StepMail,
    own: HostName,
    holders: Sequence[Collection[HostName]],
    wanted: Mapping[HostName, Collection[int]],
    held: Mapping[int, Tree],
    shapes: Sequence[Tree],
    number: int,
) -> dict[int, Tree]:
    """Return the units that this host wants: as they are where it has them, else as numpy arrays.

    Every host must call this, with the same arguments but for `own` and `held`. The holders of a unit take turns in
    sending it.

    Args:
        mail: mail of this generation, at the step that begins with the state.
        holders: the hosts that have each unit.
        wanted: what each host wants, its own units included.
        held: unit number to state, of the units of this host.
        shapes: shapes of the state of each unit, by number.
        number: index of this exchange in the generation.

    Raises:
        PeerUnreachable: a host is lost, or late; or nobody has a unit.
        Exception: what `mail.check` raises.
    """
    moves = plan_moves(holders, wanted)
    for unit in sorted({move.unit for move in moves if move.sender == own}):
        mail.check()  # to pack all of a model takes a while
        if arrays := jax.tree.leaves(held[unit]):
            data, key = pack_arrays(arrays), mail.make_key(STATE_MAIL, number, unit)
            for move in moves:
                if (move.unit, move.sender) == (unit, own):
                    mail.send(move.receiver, key, data)
    found = {unit: held[unit] for unit in wanted[own] if own in holders[unit]}
    for move in moves:
        if move.receiver == own:
            leaves, structure = jax.tree.flatten(shapes[move.unit])
            key = mail.make_key(STATE_MAIL, number, move.unit)
            arrived = mail.take_arrays(move.sender, key, leaves) if leaves else ()
            found[move.unit] = structure.unflatten(arrived)
    return dict(sorted(found.items()))
