"""The search for the fastest plan on the available devices."""

import math

from resilient_jax.planning.axes import Axis, AxisSizes, parse_axis_sizes
from resilient_jax.planning.calibration import DEFAULT_CALIBRATION, Calibration
from resilient_jax.planning.candidates import PlanCandidate, visit_candidates
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import ReplicaAxes
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.infeasibility import explain_infeasibility
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_builder import build_plan
from resilient_jax.planning.plan_explanation import explain_choice
from resilient_jax.planning.plan_request import (
    NO_CONSTRAINTS,
    NO_FIXED_AXES,
    PlanConstraints,
    PlanRequest,
    make_request,
)
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search_space import SearchSpace
from resilient_jax.planning.tensor_partition import find_divisors, find_violated_rules, require_partitionable
from resilient_jax.topology import Topology


def search_plan(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    axes: AxisSizes = NO_FIXED_AXES,
    number_format: str | None = None,
    pipeline_repeats: int = 1,
    min_replicas: int = 1,
) -> Plan:
    """Return the plan with the least estimated step time.

    Exact: no plan of the space described in `candidates` is estimated to be faster. A faster link, more memory on
    every device or one more host of the same kind never results in a slower plan.

    Args:
        program_cost: cost of the program, from `rj.planning.analyze_transformer` or `rj.planning.analyze_program`.
        topology: the available hosts; `without` and `slowed` return what is left.
        global_batch: sequences in a step, whichever hosts are left.
        calibration: constants of the cost model.
        axes: sizes that are given, such as {"tensor": 2}; all others are searched for.
        number_format: the format of matrix products; None: bf16 for a program that computes in two bytes, else fp32.
        pipeline_repeats: chunks of layers on each stage of a pipeline (interleaved schedule).
        min_replicas: least number of replicas of the state. With two or more, a job continues in place when one is
            lost; replicas that share a host are lost together.

    Raises:
        PlanError: a number is out of range, or the program does not allow a given axis size.
        NoFeasiblePlan: no plan fits in memory with as many replicas; the message says what would suffice.
        TopologyError: an accelerator has no peak for the number format.
        CallerError: no axis can shard the program.

    Example:
        >>> import resilient_jax as rj
        >>> topology = rj.planning.load_topology("meshes/h100_32x8.toml")  # doctest: +SKIP
        >>> shape = rj.planning.load_model_shape("configs/llama3_70b.toml").transformer  # doctest: +SKIP
        >>> cost = rj.planning.analyze_transformer(shape)  # doctest: +SKIP
        >>> rj.planning.search_plan(cost, topology.without("host-07"), global_batch=1024).step_time_s  # doctest: +SKIP
        17.6
    """
    request = make_request(
        program_cost,
        topology,
        global_batch=global_batch,
        calibration=calibration,
        number_format=number_format,
        pipeline_repeats=pipeline_repeats,
    )
    return search_best(request, PlanConstraints(parse_axis_sizes(axes), min_replicas=min_replicas))[0]


def search_best(
    request: PlanRequest, constraints: PlanConstraints = NO_CONSTRAINTS, top: int = 1
) -> tuple[Plan, ...]:
    """Return the best plans, no two with the same replica axes, the fastest first.

    Raises:
        PlanError: as of `search_plan`.
    """
    validate_request(request, constraints, top)
    # Two at least: the explanation compares the best plan with the next.
    best = _Best(max(top, 2))
    # Devices of unequal memory: a plan needs the least memory of its devices, so each size is searched with the hosts
    # that have as much or more. The limit of earlier searches prunes later ones.
    spaces: list[SearchSpace] = []
    for memory in sorted({kind.memory_bytes for kind in request.topology.accelerators}):
        best.cost_model = CostModel(request.with_memory(memory) if spaces else request)
        spaces.append(SearchSpace(best.cost_model, constraints))
        visit_candidates(spaces[-1], best.limit_s, best.keep)
    ranked = best.ranked()
    if not ranked:
        raise explain_infeasibility(spaces[0])
    plans = [build_plan(cost_model, candidate) for candidate, cost_model in ranked]
    return explain_choice(plans, constraints.min_replicas)[:top]


class _Best:
    """The best candidates so far, one for each choice of replica axes."""

    def __init__(self, number: int) -> None:
        self.cost_model: CostModel | None = None
        self._number = number
        self._limit_s = math.inf
        self._found: dict[ReplicaAxes, tuple[PlanCandidate, CostModel]] = {}

    def limit_s(self, axes: ReplicaAxes) -> float:
        """Return the step time from which on a candidate with these axes is of no use."""
        found = self._found.get(axes)
        return self._limit_s if found is None else min(self._limit_s, found[0].step_s)

    def keep(self, candidate: PlanCandidate) -> None:
        """Keep the candidate if it is among the best."""
        axes = candidate.layout.axes
        if candidate.step_s >= self.limit_s(axes):
            return
        assert self.cost_model is not None
        self._found[axes] = (candidate, self.cost_model)
        if len(self._found) > self._number:
            worst = max(self._found, key=lambda other: self._found[other][0].step_s)
            del self._found[worst]
        if len(self._found) == self._number:
            self._limit_s = max(candidate.step_s for candidate, _ in self._found.values())

    def ranked(self) -> list[tuple[PlanCandidate, CostModel]]:
        """Return the candidates with their cost models, the fastest first."""
        return sorted(self._found.values(), key=lambda pair: pair[0])


def validate_request(request: PlanRequest, constraints: PlanConstraints, top: int) -> None:
    """Raise an error for a request that no plan can satisfy.

    Raises:
        PlanError: a number is out of range; the message says which, what was expected and what to do.
        CallerError: no axis can shard the program.
    """
    program_cost, topology = request.program_cost, request.topology
    numbers = {
        "global_batch": request.global_batch,
        "pipeline_repeats": request.pipeline_repeats,
        "top": top,
        "min_replicas": constraints.min_replicas,
    }
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name}: found {number}, expected 1 or more")
    if topology.device_count > 1:
        require_partitionable(program_cost, topology.device_count)
    for axis, size in constraints.axes.items():
        if size < 1:
            raise PlanError(f"axis {axis}: found {size}, expected 1 or more")
        if misfits := find_violated_rules(program_cost.divisibility_rules, axis, size):
            named = ", ".join(f"{divisor.logical_name} = {divisor.dim_size}" for divisor in misfits)
            raise PlanError(
                f"axis {axis}: found {size}, expected a size that {program_cost.name} allows; it has {named}. "
                "Choose another size"
            )
    _check_sizes(topology, request.global_batch, constraints)


def _check_sizes(topology: Topology, global_batch: int, constraints: PlanConstraints) -> None:
    """Raise an error for axes that together need more sequences or devices than there are."""
    fsdp, replicas = constraints.axes.get(Axis.FSDP, 1), constraints.axes.get(Axis.REPLICA, 1)
    if fsdp not in find_divisors(global_batch):
        raise PlanError(
            f"axis fsdp: found {fsdp}, expected a divisor of the global batch of {global_batch}: every device computes "
            "as many sequences. Change one of them"
        )
    if replicas * fsdp > global_batch:
        raise PlanError(
            f"global_batch: found {global_batch}, expected at least {replicas * fsdp}: a sequence for each of replica "
            "x fsdp devices. Raise it or use fewer"
        )
    asked = math.prod(constraints.axes.values())
    if asked > topology.device_count:
        raise PlanError(
            f"axes: found sizes that take {asked} devices, expected at most the {topology.device_count} of topology "
            f"{topology.name!r}. Make them smaller"
        )
    if Axis.REPLICA in constraints.axes and replicas < constraints.min_replicas:
        raise PlanError(
            f"min_replicas: found {constraints.min_replicas}, expected at most the {replicas} of the given axis "
            "replica. Change one of them"
        )
    # R <= B / f, a sequence for each device along FSDP, and R <= N / (devices of the given axes without replicas).
    most = min(global_batch // fsdp, topology.device_count * replicas // asked)
    if constraints.min_replicas > most:
        raise PlanError(
            f"min_replicas: found {constraints.min_replicas}, expected at most {most}: each takes {asked // replicas} "
            f"or more of the {topology.device_count} devices and {fsdp} or more of a step's {global_batch} sequences. "
            "Request fewer"
        )
