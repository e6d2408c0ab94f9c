"""What losses and joins of hosts would make of planned axes: estimated while training continues, and reported.

The leader decides at a change whether the job goes on with the axes that it has or with the best ones for the hosts
that train then. The speeds are those of the planner. What the best ones would make all wait for is measured: their
programs are ready, or take as long as those of the first step did. Their search is done here, ahead, and on other hosts
where programs are compiled ahead.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName
from resilient_jax.planning.next_plans import estimate_reshard_s
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.protocol.plan_records import PlanChange, PlanConstants, PlanOutlook
from resilient_jax.protocol.recovery_records import MAX_FORESEEN_HOSTS
from resilient_jax.trainer.arrangement import AnyPlan, PlanSearcher, estimate_step_s, list_plan_axes
from resilient_jax.worker.world import World

LEAST_COMPILE_S: Final = 1.0
"""Programs that are not ready take at least so long, also if those of the first step came from a cache."""
MAX_CHANGES: Final = 32
"""So many losses are estimated, so many of whole failure domains, and so many joins, each by two searches; enough for
all of one and two hosts of six groups, and for all of eight equal ones."""
HostGroups = tuple[tuple[HostName, ...], ...]
"""In each of them it makes no difference to a plan which host is lost, or joins."""


class PlanForecast:
    """The losses and joins of one generation.

    Args:
        is_ready: whether the programs of a plan are compiled on this host.
    """

    def __init__(
        self, searcher: PlanSearcher, world: World, plan: AnyPlan, is_ready: Callable[[AnyPlan], bool]
    ) -> None:
        self._searcher, self._world, self._plan, self._is_ready = searcher, world, plan, is_ready
        self._fitted: PlanConstants = ()
        self._num_measured = 0
        self._present: HostGroups = ()
        self._absent: HostGroups = ()
        self._losses: tuple[tuple[PlanChange, AnyPlan], ...] = ()
        self._joins: tuple[tuple[PlanChange, AnyPlan], ...] = ()
        """Each with the best plan after it."""

    def estimate(self, check: CancellationCheck) -> None:
        """Search the best plans for the hosts that would be left, and for those with others. Thread-safe.

        Args:
            check: raises if the search is to end.
        """
        world, searcher = self._world, self._searcher
        if not is_forecaster(world, searcher):
            return
        groups = searcher.group_alike((*world.hosts, *searcher.all_hosts))
        self._present, self._absent = (
            tuple(tuple(host for host in group if (host in world.hosts) is is_here) for group in groups)
            for is_here in (True, False)
        )
        unchanged = self._estimate_change((), world.hosts)
        self._losses = (unchanged,) if unchanged is not None else ()
        self._losses += self._estimate_changes(
            self._present,
            [*list_likely_changes(self._present, len(world.hosts) - 1), *self._list_domains()],
            change=lambda lost: tuple(host for host in world.hosts if host not in lost),
            check=check,
        )
        self._joins = self._estimate_changes(
            self._absent,
            list_likely_changes(self._absent, sum(map(len, self._absent))),
            change=lambda joining: (*world.hosts, *joining),
            check=check,
        )

    def note_fit(self, constants: PlanConstants, num_measured: int) -> None:
        """Report these constants from now on, fitted to so many plans: those of the next generation. Thread-safe."""
        self._fitted, self._num_measured = constants, num_measured

    def report(self, compile_s: float) -> None:
        """Report what is estimated. Thread-safe.

        Args:
            compile_s: seconds that the programs of a step take to compile in this job, if no program is ready.
        """
        if not (self._losses or self._joins):
            return
        world, compile_s = self._world, max(compile_s, LEAST_COMPILE_S)

        def price(found: tuple[tuple[PlanChange, AnyPlan], ...]) -> tuple[PlanChange, ...]:
            return tuple(
                msgspec.structs.replace(change, prepare_s=0.0 if self._is_ready(plan) else compile_s)
                for change, plan in found
            )

        world.step_services.report_plans(
            PlanOutlook(
                generation=world.generation,
                axes=list_plan_axes(self._plan),
                groups=self._present,
                absent=self._absent,
                losses=price(self._losses),
                joins=price(self._joins),
                incomplete=self._searcher.list_incomplete(),
                fitted=self._fitted,
                num_measured=self._num_measured,
            )
        )

    def _estimate_changes(
        self,
        groups: HostGroups,
        likely: Iterable[tuple[int, ...]],
        *,
        change: Callable[[list[HostName]], tuple[HostName, ...]],
        check: CancellationCheck,
    ) -> tuple[tuple[PlanChange, AnyPlan], ...]:
        """Return changes, with the plans after them.

        Args:
            likely: changes as indices of groups.
            change: returns the hosts that train after a loss or join of some hosts.
            check: raises if the search is to end.
        """
        found = []
        # After another one each host takes the best plan, and the decision says why.
        for chosen in dict.fromkeys(likely):
            check()
            # Of hosts of one group the last ones.
            hosts = [groups[index][-1 - chosen[:place].count(index)] for place, index in enumerate(chosen)]
            found.append(self._estimate_change(chosen, change(hosts)))
        return tuple(one for one in found if one is not None)

    def _list_domains(self) -> list[tuple[int, ...]]:
        """Return the losses of whole failure domains, as indices of groups, of so many kinds at most."""
        index = {host: number for number, group in enumerate(self._present) for host in group}
        domains = self._searcher.list_failure_domains(self._world.hosts)
        return list(dict.fromkeys(tuple(sorted(index[host] for host in hosts)) for hosts in domains))[
            :MAX_CHANGES
        ]

    def _estimate_change(
        self, groups: tuple[int, ...], hosts: tuple[HostName, ...]
    ) -> tuple[PlanChange, AnyPlan] | None:
        try:
            best = self._searcher.find_plan(hosts)
        except CallerError:  # such a world is refused, with the reason, when it forms
            return None
        axes = list_plan_axes(best)
        needs_no_move = not self._searcher.spans_hosts or axes == list_plan_axes(self._plan)
        # v = t_now / t_then: a step has the same examples.
        kept_s = estimate_step_s(self._searcher, hosts, self._plan)
        change = PlanChange(
            groups=groups,
            kept=self._plan.step_time_s / kept_s if kept_s else 0.0,
            best=self._plan.step_time_s / best.step_time_s,
            best_axes=axes,
            move_s=0.0 if needs_no_move or isinstance(best, UnequalPlan) else estimate_reshard_s(best),
        )
        return change, best


def is_forecaster(world: World, searcher: PlanSearcher) -> bool:
    """Return whether this host estimates changes: so many do that one of them is left after any that is foreseen."""
    hosts = world.hosts
    # Outside of each failure domain that the first host is in, where all of the first ones may be, there is one.
    outside = [
        next(host for host in hosts if host not in domain)
        for domain in searcher.list_failure_domains(hosts)
        if hosts[0] in domain
    ]
    return world.host in (*hosts[: MAX_FORESEEN_HOSTS + 1], *outside)


def list_likely_changes(groups: HostGroups, most: int) -> list[tuple[int, ...]]:
    """Return the likeliest losses, or joins, of so many hosts of these groups at most, as indices of groups."""
    return list_likely_groups(list(map(len, groups)), min(most, MAX_FORESEEN_HOSTS), MAX_CHANGES)


def list_likely_groups(sizes: Sequence[int], most: int, limit: int) -> list[tuple[int, ...]]:
    """Return from which groups hosts may be that are lost, or join, at one moment: the likeliest first.

    Args:
        limit: the most changes that are returned.

    Returns:
        The indices of the hosts' groups, ascending: of one host first, then of two, and so on.

    >>> list_likely_groups([2, 1], 3, 9)
    [(0,), (1,), (0, 1), (0, 0), (0, 0, 1)]
    """
    found: list[tuple[int, ...]] = []
    for number in range(1, most + 1):
        if len(found) >= limit:
            break
        counts = {
            groups: math.prod(math.comb(size, groups.count(index)) for index, size in enumerate(sizes))
            for groups in itertools.combinations_with_replacement(range(len(sizes)), number)
        }
        found += sorted((groups for groups in counts if counts[groups]), key=lambda groups: -counts[groups])
    return found[:limit]
