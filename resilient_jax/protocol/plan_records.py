"""What the loss of a host would make of a job whose trainer runs planned axes, as its first workers report it."""

import msgspec

from resilient_jax.ids import GenerationNumber, HostName

PlanAxes = tuple[tuple[str, int], ...]
"""The axes of a replica's devices inside a host with their sizes, outermost first; empty: none are prescribed."""


class PlanLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of one of these hosts, which are alike, would make. Speeds are parts of the present one.

    Attributes:
        hosts: of which one is lost.
        kept: the estimated speed with the axes that the job has; 0: these do not fit the hosts that are left.
        best: the estimated speed with the best axes for the hosts that are left.
        best_axes: those axes.
        prepare_s: how long all wait for the programs of the best axes, in seconds, as compilations took in this job;
            0: they are ready.
    """

    hosts: tuple[HostName, ...]
    kept: float
    best: float
    best_axes: PlanAxes
    prepare_s: float = 0.0


class PlanOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of any one host would make of the present generation.

    Attributes:
        generation: the generation.
        num_hosts: of the generation.
        axes: that it has.
        losses: by groups of hosts that are alike. Of hosts in none of them it is not known.
    """

    generation: GenerationNumber
    num_hosts: int
    axes: PlanAxes
    losses: tuple[PlanLoss, ...] = ()
