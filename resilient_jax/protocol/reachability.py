"""Which hosts an agent reaches, in its status in the store."""

import msgspec

from resilient_jax.ids import GenerationNumber, HostName


class ReachReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent found when it connected to the other members, as these could not go on.

    Attributes:
        generation: the number of the generation whose members the agent has tried to reach.
        unreached: the hosts to which the agent gets no connection.
        lasting: the unreached hosts to which the agent has got no connection for so long that the store would have no
            status of a dead host any more.
    """

    generation: GenerationNumber
    unreached: tuple[HostName, ...] = ()
    lasting: tuple[HostName, ...] = ()
