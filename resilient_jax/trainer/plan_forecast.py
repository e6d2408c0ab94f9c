"""What losses of hosts would make of planned axes: estimated while training continues, and reported to the leader.

The leader decides after a loss whether the job goes on with the axes that it has or with the best ones for the hosts
that are left. The speeds are those of the planner. What the best ones would make all wait for is measured: their
programs are ready, or take as long as those of the first step did. Their search is done here, ahead, and on other hosts
where programs are compiled ahead.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName
from resilient_jax.planning.plan import Plan
from resilient_jax.protocol.plan_records import PlanLoss, PlanOutlook
from resilient_jax.trainer.arrangement import PlanSearcher, list_plan_axes
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)

LEAST_COMPILE_S: Final = 1.0
"""Programs that are not ready take at least so long, also if those of the first step came from a cache."""
NUM_REPORTING: Final = 3
"""The first hosts report: one is left if any two hosts are lost."""
MAX_LOSSES: Final = 32
"""So many losses are estimated, each by two searches; enough for all of six groups of hosts."""


class PlanForecast:
    """The losses of one generation.

    Args:
        searcher: of the job's plans.
        world: of the generation.
        plan: of the generation.
        is_ready: whether the programs of a plan are compiled, here.
    """

    def __init__(
        self, searcher: PlanSearcher, world: World, plan: Plan, is_ready: Callable[[Plan], bool]
    ) -> None:
        self._searcher, self._world, self._plan, self._is_ready = searcher, world, plan, is_ready
        self._groups: tuple[tuple[HostName, ...], ...] = ()
        self._losses: tuple[tuple[PlanLoss, Plan], ...] = ()
        """Each with the best plan after it."""

    def estimate(self, check: CancellationCheck) -> None:
        """Search the best plans for the hosts that would be left. Thread-safe.

        Args:
            check: raises if the search is to end.
        """
        world = self._world
        if len(world.hosts) > 1 and world.host in world.hosts[:NUM_REPORTING]:
            self._groups = tuple(self._searcher.group_alike(world.hosts))
            likely = list_losses([len(group) for group in self._groups])
            if len(likely) > MAX_LOSSES:
                # After another one each host takes the best plan, and the decision says why.
                logger.info("planner: estimates %d of %d kinds of losses of hosts", MAX_LOSSES, len(likely))
            found = []
            for lost in likely[:MAX_LOSSES]:
                check()
                found.append(self._estimate_loss(lost))
            self._losses = tuple(one for one in found if one is not None)

    def report(self, compile_s: float) -> None:
        """Report the losses that are estimated. Thread-safe.

        Args:
            compile_s: how long the programs of a step take in this job, if none of them is ready, in seconds.
        """
        if not self._losses:
            return
        losses = (
            msgspec.structs.replace(
                loss, prepare_s=0.0 if self._is_ready(plan) else max(compile_s, LEAST_COMPILE_S)
            )
            for loss, plan in self._losses
        )
        world = self._world
        world.step_services.report_plans(
            PlanOutlook(
                generation=world.generation,
                axes=list_plan_axes(self._plan),
                groups=self._groups,
                losses=tuple(losses),
            )
        )

    def _estimate_loss(self, lost: tuple[int, ...]) -> tuple[PlanLoss, Plan] | None:
        # Of two hosts of one group the last two.
        gone = {self._groups[index][-1 - lost[:place].count(index)] for place, index in enumerate(lost)}
        left = tuple(host for host in self._world.hosts if host not in gone)
        try:
            best = self._searcher.find_plan(left)
        except CallerError:  # such a world is refused, with the reason, when it forms
            return None
        if not isinstance(best, Plan):
            return None
        # v = t_now / t_then: a step has the same examples.
        kept_s = self._searcher.estimate_step_s(left, self._plan)
        loss = PlanLoss(
            groups=lost,
            kept=self._plan.step_time_s / kept_s if kept_s else 0.0,
            best=self._plan.step_time_s / best.step_time_s,
            best_axes=list_plan_axes(best),
        )
        return loss, best


def list_losses(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the losses of one host, and of two at once, after which hosts are left: the likeliest first.

    Args:
        sizes: of the groups of hosts.

    Returns:
        Of each loss the indices of the groups that lose a host, ascending.

    >>> list_losses([2, 1])
    [(0,), (1,), (0, 1), (0, 0)]
    """
    ones = [((index,), size) for index, size in enumerate(sizes)]
    pairs = [
        # n (n - 1) / 2 pairs are within a group, n m of two groups.
        ((one, other), sizes[one] * (sizes[one] - 1) // 2 if one == other else sizes[one] * sizes[other])
        for one, other in itertools.combinations_with_replacement(range(len(sizes)), 2)
    ]
    losses = []
    for number, found in enumerate((ones, pairs), 1):
        if sum(sizes) > number:
            likely = sorted(found, key=lambda loss: -loss[1])
            losses.extend(groups for groups, count in likely if count)
    return losses
