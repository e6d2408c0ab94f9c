"""What the loss of a host would make of planned axes: estimated while training continues, and reported to the leader.

The leader decides after a loss whether the job goes on with the axes that it has or with the best ones for the hosts
that are left. The speeds are those of the planner. What the best ones would make all wait for is measured: their
programs are ready, or take as long as those of the first step did. Their search is done here, ahead, and on other hosts
where programs are compiled ahead.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName
from resilient_jax.planning.plan import Plan
from resilient_jax.protocol.plan_records import PlanLoss, PlanOutlook
from resilient_jax.trainer.arrangement import PlanSearcher, list_plan_axes
from resilient_jax.worker.world import World

LEAST_COMPILE_S: Final = 1.0
"""Programs that are not ready take at least so long, also if those of the first step came from a cache."""
NUM_REPORTING: Final = 2
"""The first hosts report: one is left if any host is lost."""


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
        self._losses: tuple[tuple[PlanLoss, Plan], ...] = ()
        """Each with the best plan after it."""

    def estimate(self, check: CancellationCheck) -> None:
        """Search the best plans for the hosts that would be left. Thread-safe.

        Args:
            check: raises if the search is to end.
        """
        world = self._world
        if len(world.hosts) > 1 and world.host in world.hosts[:NUM_REPORTING]:
            found = []
            for hosts in self._searcher.group_alike(world.hosts):
                check()
                found.append(self._estimate_loss(hosts))
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
                num_hosts=len(world.hosts),
                axes=list_plan_axes(self._plan),
                losses=tuple(losses),
            )
        )

    def _estimate_loss(self, alike: tuple[HostName, ...]) -> tuple[PlanLoss, Plan] | None:
        left = tuple(host for host in self._world.hosts if host != alike[-1])
        try:
            best = self._searcher.find_plan(left)
        except CallerError:  # such a world is refused, with the reason, when it forms
            return None
        if not isinstance(best, Plan):
            return None
        # v = t_now / t_then: a step has the same examples.
        kept_s = self._searcher.estimate_step_s(left, self._plan)
        loss = PlanLoss(
            hosts=alike,
            kept=self._plan.step_time_s / kept_s if kept_s else 0.0,
            best=self._plan.step_time_s / best.step_time_s,
            best_axes=list_plan_axes(best),
        )
        return loss, best
