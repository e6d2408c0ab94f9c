"""Hosts that are slow, as the first worker of a generation reports them, and what the leader has made of it."""

from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.recovery_records import HostFailures, RecoveryDecision

HostSpeeds = tuple[tuple[HostName, float], ...]
"""Hosts that are slower than their peers, each with its speed as a part of theirs, by name."""

COMMON_CAUSE_STEPS: Final = 64
"""Hosts that became slow so few steps apart, and in the same way, have a cause in common."""


class SlowHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that is slow, as a measurement has confirmed.

    Attributes:
        host: the host.
        kind: what of it is slow: a value of `health.finding.FindingKind`.
        factor: how many times as long it takes as its peers.
        since_step: the first step of which that is true.
    """

    host: HostName
    kind: str
    factor: float
    since_step: int

    def describe(self) -> str:
        """Return a text such as "slow (compute): 2.1 times since step 83"."""
        return f"slow ({self.kind}): {self.factor:.1f} times since step {self.since_step}"


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """What slow hosts cost a job, once that has lasted. Speeds are parts of that with all hosts as fast as their peers.

    Attributes:
        generation: in which it was measured; it says nothing about another one.
        kept: the speed as it is, with shares by speed. Where layers are divided by speeds that hosts have no longer, it
            is below 1 although no host is slow.
        host: the slowest host; empty: none is slow.
        replaced: the speed with a sound host in its place.
        without: the speed without it; 0: the others cannot do without it.
        redivided: the speed with a pipeline's layers divided by `speeds`; 0: they are, or it is no pipeline.
        speeds: by which layers would be divided.
    """

    generation: GenerationNumber
    kept: float
    host: HostName = HostName("")
    replaced: float = 0.0
    without: float = 0.0
    redivided: float = 0.0
    speeds: HostSpeeds = ()


class SlownessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's leaders have done about slow hosts; kept in the generation.

    Attributes:
        decision: the last choice; None: there was none to make.
        speeds: by which a pipeline's layers are divided.
        divided_in: the number of the generation in which that has changed last; 0: never.
        taken_out: how often hosts were taken out because they were slow, the last one last.
        out: the hosts that were taken out so, and were no members since, the last one last.
        taken_out_as: the hosts that were taken out last, each as it was reported then, the last one last.
    """

    decision: RecoveryDecision | None = None
    speeds: HostSpeeds = ()
    divided_in: GenerationNumber = GenerationNumber(0)
    taken_out: tuple[HostFailures, ...] = ()
    out: tuple[HostName, ...] = ()
    taken_out_as: tuple[SlowHost, ...] = ()

    def count_taken_out(self, host: HostName) -> int:
        """Return how often a host was taken out because it was slow."""
        return next((one.count for one in self.taken_out if one.host == host), 0)
