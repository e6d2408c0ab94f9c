"""Which hosts an agent reaches, in its status in the store."""

import msgspec

from resilient_jax.ids import GenerationNumber, HostName


class ReachReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent found when it connected to the other members, as these could not go on.

    Attributes:
        generation: the number of the generation whose members it has tried to reach.
        unreached: the hosts to which it gets no connection.
        lasting: those of them to which it has got none for so long that the store would have no status of theirs any
            more if they were dead.
    """

    generation: GenerationNumber
    unreached: tuple[HostName, ...] = ()
    lasting: tuple[HostName, ...] = ()
