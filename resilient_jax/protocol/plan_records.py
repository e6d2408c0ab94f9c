"""What losses and joins of hosts would make of a job with planned axes, as its first workers report it."""

from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName

ANY_NUMBER: Final = 0
"""In place of a number of devices: hosts have these axes whatever their number."""
PlanAxes = tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
"""By the number of a host's devices, ascending, the axes of a replica's devices inside it with their sizes, outermost
first; empty: none are prescribed."""


PlanConstants = tuple[tuple[str, float], ...]
"""Constants of the cost model by name, as a job has fitted them to its own steps; empty: those that it was given."""


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """What it would make if these hosts were lost at once, or joined. Speeds are parts of the present one.

    Attributes:
        groups: index of each host's group in `PlanOutlook.groups`, or `absent`, ascending.
        kept: the estimated speed with the axes that the job has; 0: these do not fit the hosts that would train.
        best: the estimated speed with the best axes for the hosts that would train.
        best_axes: the axes whose speed is `best`.
        prepare_s: how long all wait for the programs of the best axes, in seconds, as compilations took in this job; 0:
            the programs are ready.
        move_s: how long hosts read shards that the best axes cut anew, in seconds, where replicas span hosts.
    """

    groups: tuple[int, ...]
    kept: float
    best: float
    best_axes: PlanAxes
    prepare_s: float = 0.0
    move_s: float = 0.0


class PlanOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What it would make of the present generation if hosts were lost at once, or joined.

    Attributes:
        generation: the generation that the estimates are for.
        axes: sizes of the axes that the generation has.
        groups: hosts of the generation in groups. Which host of a group is lost makes no difference.
        absent: the other hosts of the topology in these groups. Such a host in the place of a lost one is as good.
        losses: estimated losses; what other losses would make is not known. One loss has no `groups`: nobody is lost.
        joins: the same estimates for joins of hosts that are absent.
        fitted: constants of the cost model that fit the steps of this job, for the next generation; the estimates here
            are by the constants of the present generation. Empty: nothing was measured yet.
        num_measured: plans that the constants were fitted to.
        incomplete: hosts that count with fewer devices than the topology gives them: a host that joins may have more.
    """

    generation: GenerationNumber
    axes: PlanAxes
    groups: tuple[tuple[HostName, ...], ...]
    absent: tuple[tuple[HostName, ...], ...] = ()
    losses: tuple[PlanChange, ...] = ()
    joins: tuple[PlanChange, ...] = ()
    incomplete: tuple[HostName, ...] = ()
    fitted: PlanConstants = ()
    num_measured: int = 0
