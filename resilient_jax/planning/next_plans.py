"""The plans that may follow when hosts change: what a job could run then, and what precedes its first step."""

import dataclasses
from collections.abc import Callable
from typing import Final

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import find_device_links
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.placement import place_replicas
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import PlanConstraints, PlanRequest
from resilient_jax.planning.search import search_best
from resilient_jax.planning.state_migration import StateMigration, plan_migration, plan_team_migration
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.planning.unequal_search import search_unequal_plan
from resilient_jax.topology import Topology

DEFAULT_COMPILE_S: Final = 60.0
"""Compile time of a program that no cache has: assumed; large programs take from half a minute to some minutes."""
MAX_PLANS: Final = 64
"""Among the fastest plans, in which that whose replicas are inside hosts is looked for."""
NO_MIGRATION: Final = StateMigration(transfers=(), is_exact=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """A plan that may follow, and what precedes its first step.

    Attributes:
        step_time_s: seconds of each step. All hosts may wait for slow ones, or replicas compute nothing, so that it is
            longer than that of the plan.
        compile_s: time of the program, where no cache has it.
        migration: what moves of the state.
        migration_s: time in which the state moves.
    """

    plan: Plan | UnequalPlan
    step_time_s: float
    compile_s: float = 0.0
    migration: StateMigration = NO_MIGRATION
    migration_s: float = 0.0

    @property
    def transition_s(self) -> float:
        """Time before the first step, beside what a change takes in any case."""
        return self.compile_s + self.migration_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextPlans:
    """The plans that may follow another one on given hosts.

    Attributes:
        best: the fastest plan that a job can run. A pipeline keeps its axes, and replicas inside hosts stay inside, as
            far as such a plan fits.
        kept: the program of before, on as many replicas as there are places for; None: it does not fit.
        unequal: a faster plan of unequal teams that no job runs; None: there is none.
    """

    best: NextPlan
    kept: NextPlan | None
    unequal: NextPlan | None


def is_same_program(plan: Plan, other: Plan | UnequalPlan) -> bool:
    """Return whether both plans run the same program on each replica: its axes, its microbatch, its layers."""
    if isinstance(other, UnequalPlan):
        return False
    splits = {replica_class.layers for replica_class in plan.replica_classes}
    return (plan.layout.axes, plan.microbatch) == (other.layout.axes, other.microbatch) and all(
        replica_class.layers in splits for replica_class in other.replica_classes
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextPlanSearch:
    """Searches the plans that may follow another one.

    Attributes:
        min_replicas: as in `search_plan`.
        compile_s: seconds to compile a program that no cache has.
        is_compiled: whether a cache has the program of a plan; None: a job has compiled ahead what it foresees.
    """

    min_replicas: int = 1
    compile_s: float = DEFAULT_COMPILE_S
    is_compiled: Callable[[Plan | UnequalPlan], bool] | None = None

    def search(self, plan: Plan, topology: Topology, *, is_foreseen: bool) -> NextPlans:
        """Return the plans that may follow on the hosts that there are then.

        Args:
            is_foreseen: whether a job compiles ahead what it needs after such a change.

        Raises:
            PlanError: no plan fits, or there is too little for as many replicas.
        """
        kept = self.try_keep(plan, topology)
        plans: list[Plan | UnequalPlan] = [kept] if kept is not None else []
        if kept is None or plan.layout.axes.pipeline == 1:
            plans.append(self._search_runnable(plan, topology))
        unequal = search_unequal_plan(plan.request.on_topology(topology), self.min_replicas)
        if unequal is not None and _can_run(unequal, plan):
            plans.append(unequal)
        best = min(plans, key=lambda one: one.step_time_s)
        return NextPlans(
            best=self.price(plan, best, is_foreseen=is_foreseen),
            kept=self.price(plan, kept, is_foreseen=is_foreseen) if kept is not None else None,
            unequal=self.price(plan, unequal, is_foreseen=is_foreseen)
            if unequal is not None and unequal.step_time_s < best.step_time_s
            else None,
        )

    def try_search(self, plan: Plan, topology: Topology) -> NextPlan | None:
        """Return the best plan that may follow after a change that a job foresees; None: no plan fits."""
        try:
            return self.search(plan, topology, is_foreseen=True).best
        except PlanError:
            return None

    def try_same_axes(self, plan: Plan, topology: Topology) -> Plan | None:
        """Return the fastest plan with the axes and the microbatch of another one; None: there is none."""
        replica_axes = plan.layout.axes
        axes = {axis: size for axis, size in plan.axis_sizes.items() if axis.value in replica_axes._fields}
        try:
            constraints = PlanConstraints(axes, plan.microbatch, self.min_replicas)
            return search_best(plan.request.on_topology(topology), constraints)[0]
        except PlanError:
            return None

    def try_keep(self, plan: Plan, topology: Topology) -> Plan | None:
        """Return the fastest plan with the program of another one, on other replicas; None: there is none."""
        kept = self.try_same_axes(plan, topology)
        return kept if kept is not None and is_same_program(plan, kept) else None

    def price(self, before: Plan, plan: Plan | UnequalPlan, *, is_foreseen: bool) -> NextPlan:
        """Return a plan with the times of its program and its state."""
        is_ready = is_foreseen if self.is_compiled is None else self.is_compiled(plan)
        migration = (
            plan_team_migration(before, [team.plan for team in plan.teams])
            if isinstance(plan, UnequalPlan)
            else plan_migration(before, plan)
        )
        return NextPlan(
            plan=plan,
            step_time_s=plan.step_time_s,
            compile_s=0.0 if is_ready or is_same_program(before, plan) else self.compile_s,
            migration=migration,
            migration_s=_estimate_migration_s(before, migration),
        )

    def _search_runnable(self, plan: Plan, topology: Topology) -> Plan:
        """Return the fastest plan that may follow: after one that is no pipeline none, and with replicas inside hosts
        if it has them; after a pipeline, whose axes do not fit any more, any.
        """
        given = {Axis.PIPELINE: 1} if plan.layout.axes.pipeline == 1 else {}
        constraints = PlanConstraints(given, min_replicas=self.min_replicas)
        found = search_best(plan.request.on_topology(topology), constraints, MAX_PLANS)
        inside = [one for one in found if one.layout.host_slots == 1]
        return inside[0] if plan.layout.host_slots == 1 and inside else found[0]


def price_kept_stages_s(plan: Plan, topology: Topology, lost: set[str]) -> float:
    """Return the seconds of a step in which replicas that have lost a host compute nothing; 0: the plan is no pipeline,
    no replica has lost one, or none is complete.

    Args:
        topology: topology on which the plan runs, before the loss.
        lost: names of hosts.
    """
    if plan.layout.axes.pipeline == 1:
        return 0.0
    placed = place_replicas(topology, plan.request.pool, plan.layout, plan.compositions, plan.blocks)
    replicas = [{topology.hosts[place].name for place in places} for places in placed]
    broken = [hosts for hosts in replicas if hosts & lost]
    out = lost.union(*broken)
    if not broken or len(out) == len(topology.hosts):
        return 0.0
    kept = NextPlanSearch().try_keep(plan, topology.without(*out))
    return kept.step_time_s if kept is not None else 0.0


def _estimate_migration_s(before: Plan, migration: StateMigration) -> float:
    return _estimate_transfer_s(before.request, migration.count_max_host_bytes())


def estimate_reshard_s(plan: Plan) -> float:
    """Return the seconds in which each host reads all of its shards from others: at most, for it may have some."""
    held_bytes = plan.memory.parameters + plan.memory.optimizer
    return _estimate_transfer_s(plan.request, held_bytes * plan.request.pool.devices_per_host)


def _estimate_transfer_s(request: PlanRequest, host_bytes: float) -> float:
    # move = bytes / (bandwidth devices) + latency, in s: the bytes of the host that sends or receives the most, over
    # the outermost links of all its devices at once.
    links = find_device_links(
        request.topology, request.calibration.link_efficiency, request.calibration.latency_factor
    )
    bandwidth = links[-1].bytes_per_s * request.pool.devices_per_host
    return host_bytes / bandwidth + (links[-1].latency_s if host_bytes else 0.0)


def _can_run(after: UnequalPlan, before: Plan) -> bool:
    """Return whether a job can go on with unequal teams: they share no host, and are pipelines only if it was one."""
    hosts = [host.name for team in after.teams for host in team.plan.request.topology.hosts]
    layouts = [team.plan.layout for team in after.teams]
    # Each stage is on a host, as is a replica without stages.
    if len(set(hosts)) < len(hosts) or any(layout.axes.pipeline != layout.host_slots for layout in layouts):
        return False
    was = before.layout.axes
    if was.pipeline == 1:
        return all(layout.axes.pipeline == 1 for layout in layouts)
    # A pipeline keeps the axes of its stages' devices, and some replica may have fewer stages.
    return all(
        layout.axes.pipeline <= was.pipeline and layout.axes._replace(pipeline=was.pipeline) == was
        for layout in layouts
    )
