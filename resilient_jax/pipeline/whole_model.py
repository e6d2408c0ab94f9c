"""The state of the whole model in the memory of every host, for a checkpoint, an evaluation or the result.

Each unit is sent by the first of its holders to the hosts that have it not. All of it must fit a host's memory.
"""

from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from resilient_jax.ids import HostName
from resilient_jax.pipeline.array_packing import pack_arrays
from resilient_jax.pipeline.block_state import UnitState
from resilient_jax.pipeline.step_mail import StepMail
from resilient_jax.transport.mail_protocol import MailKind


def gather_units(
    mail: StepMail,
    own: HostName,
    hosts: Sequence[HostName],
    holders: Mapping[int, Collection[HostName]],
    held: Mapping[int, UnitState],
    shapes: Sequence[UnitState],
    number: int = 0,
) -> dict[int, UnitState]:
    """Return all units as numpy arrays. Every host must call this.

    Args:
        mail: of the step that the state begins.
        own: this host.
        hosts: all of them, in the same order everywhere.
        holders: the hosts that have each unit, by number.
        held: the units of this host.
        shapes: of all units, by number.
        number: of this gathering, another one each time in a step.

    Raises:
        PeerUnreachable: a host is lost, or late.
    """
    found: dict[int, UnitState] = {}
    senders = {unit: next(host for host in hosts if host in having) for unit, having in holders.items()}
    for unit, state in held.items():
        arrays = [np.array(leaf) for leaf in jax.tree.leaves(state)]
        found[unit] = jax.tree.structure(state).unflatten(arrays)
        if senders[unit] == own and arrays:
            for host in hosts:
                if host not in holders[unit]:
                    mail.send(host, mail.make_key(MailKind.STATE, number, unit), pack_arrays(arrays))
    for unit, sender in senders.items():
        if unit not in held:
            leaves, structure = jax.tree.flatten(shapes[unit])
            key = mail.make_key(MailKind.STATE, number, unit)
            arrays = [np.array(array) for array in mail.take_arrays(sender, key, leaves)] if leaves else []
            found[unit] = structure.unflatten(arrays)
    return dict(sorted(found.items()))
