"""What a process of simulated agents is told and tells, as lines of JSON on its standard input and output."""

import msgspec

from resilient_jax.protocol.generation import GenerationPhase


class Register(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Register the hosts before this index that are not registered yet."""

    up_to: int


class Train(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Have all hosts make a step a second from now on."""


class LoseLast(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Have the last host of this process give its lease back."""


AgentsOrder = Register | Train | LoseLast


class Registered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The agents that were to register have.

    Attributes:
        at_s: the monotonic time at which they began to.
    """

    at_s: float


class Lost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A host is about to give its lease back, at this monotonic time."""

    at_s: float


class AllRead(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All agents of the process have read this phase of a generation.

    Attributes:
        number: of the generation.
        phase: the phase.
        at_s: the monotonic time of the last of them.
        bytes_read: that each has read of generations since it registered; the mean.
        newest_bytes: of them, what the last to read this generation has read for it.
    """

    number: int
    phase: GenerationPhase
    at_s: float
    bytes_read: float
    newest_bytes: int


AgentsMessage = Registered | Lost | AllRead
