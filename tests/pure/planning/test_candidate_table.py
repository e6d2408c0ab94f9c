"""The table of candidates: its column is a bound of the step times of each row, and rows come in its order."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.candidate_table import tabulate_candidates
from resilient_jax.planning.candidates import find_useful_levels, visit_candidates
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.host_pool import build_host_pool
from resilient_jax.planning.plan_request import NO_CONSTRAINTS, PlanRequest
from resilient_jax.planning.search_space import SearchSpace
from tests.support.plan_topologies import cluster, clusters, small_profile
from tests.support.properties import examples

PROFILE = small_profile()


def make_space(topology, global_batch=6):
    """Return the candidates of a request, and their table."""
    request = PlanRequest(
        program_cost=PROFILE,
        topology=topology,
        pool=build_host_pool(topology, "bf16"),
        global_batch=global_batch,
        calibration=Calibration(),
        number_format="bf16",
    )
    cost_model = CostModel(request)
    space = SearchSpace(cost_model, NO_CONSTRAINTS)
    return space, tabulate_candidates(space, find_useful_levels(cost_model, 2))


def price_all(space):
    """Return the least step time of each row that has a plan."""
    found: dict[tuple[Any, Any], float] = {}

    def keep(candidate):
        key = (candidate.layout.axes, candidate.microbatch)
        found[key] = min(candidate.step_s, found.get(key, math.inf))

    visit_candidates(space, lambda _: math.inf, keep)
    return found


@examples(few=5)
@given(clusters(most_hosts=3), st.sampled_from([1, 6]))
def test_no_plan_is_faster_than_its_row_says(topology, global_batch):
    space, table = make_space(topology, global_batch)
    least = {(axes, microbatch): least_s for least_s, axes, microbatch in table.ascending()}
    priced = price_all(space)
    assert priced.keys() <= least.keys()
    assert all(least[axes, microbatch] <= step_s for (axes, microbatch), step_s in priced.items())


def test_rows_come_in_the_order_of_their_bounds_each_once():
    _, table = make_space(cluster([1.0] * 4, devices=4), 96)
    rows = list(table.ascending())
    assert len(rows) == len(table.least_s) > 4 * 64
    assert [row.least_s for row in rows] == sorted(row.least_s for row in rows)
    assert len({row[1:] for row in rows}) == len(rows)


def test_on_equal_hosts_a_row_without_replicas_costs_what_it_says_but_for_the_ends():
    space, table = make_space(cluster([1.0], devices=1), 1)
    for least_s, axes, microbatch in table.ascending():
        assert price_all(space)[axes, microbatch] == pytest.approx(least_s, rel=0.05)
