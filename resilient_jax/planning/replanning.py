"""Replanning after a failure: a new plan of equal or unequal replicas, the old plan on fewer, or rerouted work.

Options are compared by Chameleon's score (arXiv 2508.21613), the samples per second until the next failure. With batch
B, step time t, transition time T and time D to the next failure, `score = (B / t) (D - T) / D`; a new plan with step
time t_dyn beats rerouting with t_rr from `D = T / (1 - t_dyn / t_rr)` on.
"""

import collections
import dataclasses
import enum
import functools
import math
from collections.abc import Callable

from resilient_jax.planning.collectives import find_device_links
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.pipeline import find_weight_share
from resilient_jax.planning.placement import place_replicas
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_explanation import explain_change
from resilient_jax.planning.plan_request import NO_FIXED_AXES, PlanConstraints
from resilient_jax.planning.rerouted_step import LostStage, price_rerouted_s
from resilient_jax.planning.search import search_plans
from resilient_jax.planning.state_migration import (
    HostTransfer,
    StateMigration,
    plan_migration,
    plan_team_migration,
)
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.planning.unequal_search import search_unequal_plan
from resilient_jax.policy.score import DEVICE_HOURS_PER_FAILURE, HOUR_S, compute_score
from resilient_jax.topology import Topology

DEFAULT_COMPILE_S = 60.0
"""Compile time of a program that no cache has: assumed; large programs take from half a minute to some minutes."""


class ReplanAction(enum.StrEnum):
    """What to do after a failure."""

    NEW = "new"
    """Take another plan: other axes, or another microbatch."""
    KEEP = "keep"
    """Keep the program, on the replicas that are left, or on as many as are possible now."""
    UNEQUAL = "unequal"
    """Take a plan of unequal teams, so that more devices work than equal replicas can use."""
    REROUTE = "reroute"
    """Move no state: the peers of a lost stage compute its microbatches."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanOption:
    """One action with its costs.

    Attributes:
        action: what the job does about the change.
        plan: the plan that runs then; for `REROUTE` the plan before, for `UNEQUAL` one of unequal teams.
        step_time_s: seconds of each step after the change.
        search_s, compile_s, migration_s: times before the first step: the search where it was not done ahead, the
            program where no cache has it, the state.
        migration: what moves of the state.
        score: samples per second over the time to the next failure; 0 if the transition takes longer.
    """

    action: ReplanAction
    plan: Plan | UnequalPlan
    step_time_s: float
    search_s: float
    compile_s: float
    migration_s: float
    migration: StateMigration
    score: float

    @property
    def transition_s(self) -> float:
        """Time before the first step."""
        return self.search_s + self.compile_s + self.migration_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanDecision:
    """What to do after a change of the topology, and why.

    Attributes:
        before: the plan that ran.
        chosen: the option with the best score.
        others: all others, the best first.
        next_failure_s: expected time to the next failure.
        reason: why, in sentences.
    """

    before: Plan
    chosen: ReplanOption
    others: tuple[ReplanOption, ...]
    next_failure_s: float
    reason: str

    @property
    def plan(self) -> Plan | UnequalPlan:
        """The plan that runs from now on."""
        return self.chosen.plan

    @property
    def step_time_s(self) -> float:
        """Estimated time of each step from now on."""
        return self.chosen.step_time_s

    @property
    def bytes_moved(self) -> float:
        """Bytes of the state that move over the network."""
        return self.chosen.migration.bytes_moved

    @property
    def transfers(self) -> tuple[HostTransfer, ...]:
        """Bytes from host to host."""
        return self.chosen.migration.transfers

    @property
    def transition_s(self) -> float:
        """Time before the first step."""
        return self.chosen.transition_s


def estimate_next_failure_s(topology: Topology) -> float:
    """Return the mean time to the next failure of any of the devices."""
    # D = (device hours per failure) / devices, in s: the rates of independent failures add up.
    return DEVICE_HOURS_PER_FAILURE / topology.device_count * HOUR_S


def _is_never_compiled(_: Plan) -> bool:
    return False


def replan(
    plan: Plan,
    topology: Topology,
    *,
    next_failure_s: float | None = None,
    search_s: float = 0.0,
    compile_s: float = DEFAULT_COMPILE_S,
    is_compiled: Callable[[Plan], bool] = _is_never_compiled,
    min_replicas: int = 1,
) -> ReplanDecision:
    """Return what to do now that the topology has changed: take a new plan, or keep the old one as far as possible.

    Each option is scored by the samples that it computes until the next expected failure.

    Args:
        plan: the plan that ran.
        topology: the hosts available now, as `without`, `slowed` and `with_hosts` return it.
        next_failure_s: expected time to the next failure; None: as `estimate_next_failure_s`.
        search_s: time of a search that training has to wait for; 0 where the search was done ahead.
        compile_s: time of compiling a program that no cache has.
        is_compiled: whether a cache has the program of a plan; the program of the plan before is always cached.
        min_replicas: least number of replicas of the state under every option; as in `search_plan`.

    Raises:
        NoFeasiblePlan: no plan fits in memory with as many replicas; the message says what would suffice.

    Example:
        >>> after = replan(plan, topology.without("host-07").slowed("host-11", 0.6))  # doctest: +SKIP
        >>> print(after.reason, after.step_time_s, after.bytes_moved)  # doctest: +SKIP
    """
    horizon = estimate_next_failure_s(topology) if next_failure_s is None else next_failure_s
    if not (math.isfinite(horizon) and horizon > 0 and search_s >= 0 and compile_s >= 0):
        raise PlanError(
            f"replan: found next_failure_s {horizon}, search_s {search_s}, compile_s {compile_s}, expected a finite "
            "time > 0 and times >= 0"
        )
    new = search_again(plan, topology, PlanConstraints(NO_FIXED_AXES, min_replicas=min_replicas))
    options = [
        make_option(
            plan,
            new,
            horizon,
            search_s,
            0.0 if is_same_program(plan, new) or is_compiled(new) else compile_s,
        )
    ]
    if not is_same_program(plan, new) and (kept := try_keep(plan, topology, min_replicas)) is not None:
        options.append(make_option(plan, kept, horizon, 0.0, 0.0))
    # Whole hosts of other speeds get other quotas and layers in equal replicas, too.
    devices = {(host.devices, host.device_speeds) for host in topology.hosts}
    is_uneven = new.devices_spare > 0 or len(devices) > 1
    if is_uneven and (unequal := try_unequal(plan, topology, horizon, search_s, compile_s, min_replicas)):
        options.append(unequal)
    if (stayed := try_stay(plan, topology, horizon, min_replicas)) is not None:
        options.append(stayed)
    if (rerouted := _try_reroute(plan, topology, horizon, min_replicas)) is not None:
        options.append(rerouted)
    options.sort(key=lambda option: (-option.score, option.step_time_s))
    return ReplanDecision(
        before=plan,
        chosen=options[0],
        others=tuple(options[1:]),
        next_failure_s=horizon,
        reason=_explain(plan, options, horizon),
    )


def search_again(plan: Plan, topology: Topology, constraints: PlanConstraints) -> Plan:
    """Return the fastest plan for what another plan computes, on a topology that has changed.

    Raises:
        PlanError: there is none under these constraints, or none that fits in memory.
    """
    request = plan.request
    return search_plans(
        request.program_cost,
        topology,
        global_batch=request.global_batch,
        calibration=request.calibration,
        constraints=constraints,
        number_format=request.number_format,
        pipeline_repeats=request.pipeline_repeats,
    )[0]


def is_same_program(plan: Plan, other: Plan) -> bool:
    """Return whether both plans run the same program on each replica: its axes, its microbatch, its layers."""
    splits = {replica_class.layers for replica_class in plan.replica_classes}
    return (plan.layout.axes, plan.microbatch) == (other.layout.axes, other.microbatch) and all(
        replica_class.layers in splits for replica_class in other.replica_classes
    )


def try_keep(plan: Plan, topology: Topology, min_replicas: int) -> Plan | None:
    """Return the fastest plan with the program of another one, with other replicas or quotas; None: there is none."""
    replica_axes = plan.layout.axes
    axes = {axis: size for axis, size in plan.axis_sizes.items() if axis.value in replica_axes._fields}
    try:
        kept = search_again(plan, topology, PlanConstraints(axes, plan.microbatch, min_replicas))
    except (NoFeasiblePlan, PlanError):
        return None
    return kept if is_same_program(plan, kept) else None


def make_option(before: Plan, plan: Plan, horizon: float, search_s: float, compile_s: float) -> ReplanOption:
    """Return the option to go on with a plan of equal replicas."""
    # move = bytes / (bandwidth devices) + latency, in s: the bytes of the host that sends or receives the most, over
    # the outermost links of all its devices at once. T = search + compile + move.
    migration = plan_migration(before, plan)
    migration_s = _estimate_migration_s(before, migration)
    return ReplanOption(
        action=ReplanAction.KEEP if is_same_program(before, plan) else ReplanAction.NEW,
        plan=plan,
        step_time_s=plan.step_time_s,
        search_s=search_s,
        compile_s=compile_s,
        migration_s=migration_s,
        migration=migration,
        score=compute_score(plan.global_batch, plan.step_time_s, search_s + compile_s + migration_s, horizon),
    )


def _estimate_migration_s(before: Plan, migration: StateMigration) -> float:
    request = before.request
    links = find_device_links(
        request.topology, request.calibration.link_efficiency, request.calibration.latency_factor
    )
    bandwidth = links[-1].bytes_per_s * request.pool.devices_per_host
    return migration.count_max_host_bytes() / bandwidth + (
        links[-1].latency_s if migration.transfers else 0.0
    )


def try_unequal(
    before: Plan, topology: Topology, horizon: float, search_s: float, compile_s: float, min_replicas: int
) -> ReplanOption | None:
    """Return the option of unequal teams, none of whose programs a cache has; None: there is none."""
    request = before.request
    plan = search_unequal_plan(
        request.program_cost,
        topology,
        global_batch=request.global_batch,
        calibration=request.calibration,
        number_format=request.number_format,
        min_replicas=min_replicas,
    )
    if plan is None:
        return None
    migration = plan_team_migration(before, [team.plan for team in plan.teams])
    migration_s = _estimate_migration_s(before, migration)
    return ReplanOption(
        action=ReplanAction.UNEQUAL,
        plan=plan,
        step_time_s=plan.step_time_s,
        search_s=search_s,
        compile_s=compile_s,
        migration_s=migration_s,
        migration=migration,
        score=compute_score(plan.global_batch, plan.step_time_s, search_s + compile_s + migration_s, horizon),
    )


def _try_reroute(plan: Plan, topology: Topology, horizon: float, min_replicas: int) -> ReplanOption | None:
    """Return the option of rerouting; only for a pipeline that lost hosts and is otherwise unchanged.

    Peers of the lost stages do their work. The state then has as many copies as the stage that lost most.
    """
    if plan.layout.axes.pipeline == 1 or plan.replicas == 1:
        return None
    replica_class, *others = plan.replica_classes
    now = {host.name: host for host in topology.hosts}
    was = plan.request.topology
    if others or len(now) >= len(was.hosts) or any(host != now.get(host.name, host) for host in was.hosts):
        return None
    lost = _find_lost_stages(plan, set(now))
    if not lost:
        return None
    stages = plan.layout.axes.pipeline
    if plan.replicas - max(collections.Counter(stage for _, stage in lost).values()) < min_replicas:
        return None
    # step = before + rerouted - undisturbed, in s, both simulated: all-reduce and update stay.
    price = functools.partial(
        price_rerouted_s,
        stages,
        plan.quotas,
        stage_s=replica_class.stage_s,
        transfer_s=replica_class.transfer_s,
        weight_share=find_weight_share(is_remat=plan.microbatch.remat),
    )
    rerouted, undisturbed = price(lost=lost), price(lost=())
    if rerouted is None or undisturbed is None:
        return None
    step = plan.step_time_s + rerouted - undisturbed
    return _make_immediate_option(ReplanAction.REROUTE, plan, step, horizon)


def _make_immediate_option(
    action: ReplanAction, plan: Plan, step_time_s: float, horizon: float
) -> ReplanOption:
    """Return an option that keeps the plan before: nothing is searched, compiled or moved."""
    return ReplanOption(
        action=action,
        plan=plan,
        step_time_s=step_time_s,
        search_s=0.0,
        compile_s=0.0,
        migration_s=0.0,
        migration=StateMigration(transfers=(), is_exact=True),
        score=compute_score(plan.global_batch, step_time_s, 0.0, horizon),
    )


def try_stay(plan: Plan, topology: Topology, horizon: float, min_replicas: int) -> ReplanOption | None:
    """Return the option of changing nothing, if all hosts are there and some are slower now.

    All hosts wait for the slowest, at most: what a step takes besides computing does not become slower.
    """
    was = plan.request.topology
    if plan.replicas < min_replicas or _list_hosts_without_speeds(was) != _list_hosts_without_speeds(
        topology
    ):
        return None
    # step = before / min_h (speed_h now / speed_h before), an upper bound in s. If no host is slower, the search
    # finds the same plan again, or a better one.
    slowest = min(host.speed / old.speed for host, old in zip(topology.hosts, was.hosts, strict=True))
    if slowest >= 1:
        return None
    return _make_immediate_option(ReplanAction.KEEP, plan, plan.step_time_s / slowest, horizon)


def _list_hosts_without_speeds(topology: Topology) -> tuple[object, ...]:
    hosts = tuple((host.name, host.accelerator, host.devices, host.domains) for host in topology.hosts)
    return topology.levels, hosts


def _find_lost_stages(plan: Plan, alive: set[str]) -> frozenset[LostStage]:
    """Return the stages of replicas that lost a host."""
    request, layout = plan.request, plan.layout
    hosts = request.topology.hosts
    lost: set[LostStage] = set()
    placed = place_replicas(request.topology, request.pool, layout, plan.compositions, plan.blocks)
    for index, cells in enumerate(placed):
        # With s stages per host, stage i of P is on c s / P of a replica's c slots, from the (i // s)-th such group on.
        # One missing host makes the stage fail in all replicas that share the slot.
        each = len(cells) * layout.stages_per_host // layout.axes.pipeline
        sharing = range(index * layout.replicas_per_slot, (index + 1) * layout.replicas_per_slot)
        for stage in range(layout.axes.pipeline):
            start = stage // layout.stages_per_host * each
            if any(hosts[place].name not in alive for place in cells[start : start + each]):
                lost.update((replica, stage) for replica in sharing)
    return frozenset(lost)


def _compute_loss(option: ReplanOption, best: ReplanOption) -> float:
    # 1 - score / best score: the fraction of samples that an option computes less.
    return 1 - option.score / best.score if best.score else 0.0


def _explain(before: Plan, options: list[ReplanOption], horizon: float) -> str:
    best = options[0]
    stays = best.plan is before
    said = {
        ReplanAction.NEW: f"A new plan, {best.plan.shape}",
        ReplanAction.KEEP: f"The plan before, {best.plan.shape}"
        + (", unchanged; all wait for the slowest" if stays else " now"),
        ReplanAction.UNEQUAL: f"Unequal teams, {best.plan.shape}",
        ReplanAction.REROUTE: f"The plan before, {best.plan.shape}; peers compute what the lost hosts would have",
    }[best.action]
    sentences = [
        f"{said}: {best.step_time_s:.3g} s a step after {best.transition_s:.3g} s (search {best.search_s:.3g} s, "
        f"compile {best.compile_s:.3g} s, move {best.migration.bytes_moved / 1e9:.3g} GB in {best.migration_s:.3g} s).",
        *(
            f"Not {option.action} ({option.plan.shape}): {option.step_time_s:.3g} s a step after "
            f"{option.transition_s:.3g} s, {_compute_loss(option, best):.1%} fewer samples in the "
            f"{horizon / HOUR_S:.3g} h to the next failure."
            for option in options[1:]
        ),
        ""
        if any(option.action is ReplanAction.KEEP for option in options)
        else f"{before.shape} does not fit the hosts that are left.",
        "Of unequal teams jobs run those of whole hosts." if best.action is ReplanAction.UNEQUAL else "",
        "" if stays else explain_change(best.plan, before),
        f"{best.migration.bytes_lost / 1e9:.3g} GB are on no host that is left: they come from parity or a checkpoint."
        if best.migration.bytes_lost
        else "",
        ""
        if best.migration.is_exact
        else "The assignment of hosts was found greedily: another one might move fewer bytes.",
    ]
    return " ".join(sentence for sentence in sentences if sentence)
