"""What losses of hosts would make of a job whose trainer runs planned axes, as its first workers report it."""

import msgspec

from resilient_jax.ids import GenerationNumber, HostName

PlanAxes = tuple[tuple[str, int], ...]
"""The axes of a replica's devices inside a host with their sizes, outermost first; empty: none are prescribed."""


class PlanLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of these hosts at once would make. Speeds are parts of the present one.

    Attributes:
        groups: of each lost host the index of its group in `PlanOutlook.groups`, ascending.
        kept: the estimated speed with the axes that the job has; 0: these do not fit the hosts that are left.
        best: the estimated speed with the best axes for the hosts that are left.
        best_axes: those axes.
        prepare_s: how long all wait for the programs of the best axes, in seconds, as compilations took in this job;
            0: they are ready.
    """

    groups: tuple[int, ...]
    kept: float
    best: float
    best_axes: PlanAxes
    prepare_s: float = 0.0


class PlanOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of one host, or of two at once, would make of the present generation.

    Attributes:
        generation: the generation.
        axes: that it has.
        groups: its hosts. Which one of a group is lost makes no difference.
        losses: that are estimated; of others it is not known what they would make.
    """

    generation: GenerationNumber
    axes: PlanAxes
    groups: tuple[tuple[HostName, ...], ...]
    losses: tuple[PlanLoss, ...] = ()
