"""Searches of plans in one call: program, topology, and what is given."""

from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import NO_CONSTRAINTS, PlanConstraints, make_request
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import search_best
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.planning.unequal_search import search_unequal_plan
from resilient_jax.topology import Topology


def search_plans(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    constraints: PlanConstraints = NO_CONSTRAINTS,
    top: int = 1,
    **options,
) -> tuple[Plan, ...]:
    """Return the best plans; other options are those of `make_request`."""
    return search_best(make_request(program_cost, topology, **options), constraints, top)


def search_unequal(
    program_cost: ProgramCost, topology: Topology, *, min_replicas: int = 1, **options
) -> UnequalPlan | None:
    """Return the fastest plan of unequal teams; other options are those of `make_request`."""
    return search_unequal_plan(make_request(program_cost, topology, **options), min_replicas)
