"""The axes of the devices of each host of a pipeline, as the planner chooses them."""

import pytest

from resilient_jax.planning.axes import Axis, AxisSizes
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.plan_request import NO_FIXED_AXES, PlanConstraints, constrain_to_stages
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import cluster, small_profile, tight_bytes

FOUR_HOSTS = cluster([1.0] * 4, devices=4)


def search(cost, topology, *, axes: AxisSizes = NO_FIXED_AXES, shared_examples=None):
    constraints = constrain_to_stages(topology, 2, axes, 4, shared_examples)
    return search_plans(cost, topology, global_batch=32, constraints=constraints)[0]


def test_a_stage_is_all_devices_of_a_host_and_no_other_choice_of_its_axes_is_faster():
    cost = small_profile()
    plan = search(cost, FOUR_HOSTS)
    sizes = plan.axis_sizes
    assert (sizes[Axis.PIPELINE], plan.replicas) == (2, 2)
    assert sizes[Axis.FSDP] * sizes[Axis.TENSOR] * sizes[Axis.EXPERT] == 4
    assert plan.layout.stages_per_host == 1
    others = []
    for fsdp, tensor in ((4, 1), (2, 2), (1, 4)):
        axes = {Axis.REPLICA: 2, Axis.PIPELINE: 2, Axis.SEQUENCE: 1, Axis.FSDP: fsdp, Axis.TENSOR: tensor}
        constraints = PlanConstraints(axes, MicrobatchConfig(sequences=4 // fsdp))
        found = search_plans(cost, FOUR_HOSTS, global_batch=32, constraints=constraints)
        others.append(found[0].step_time_s)
    assert plan.step_time_s == min(others)
    assert len(set(others)) > 1


def test_axes_that_are_given_are_kept():
    plan = search(small_profile(), FOUR_HOSTS, axes={"tensor": 2})
    assert (plan.axis_sizes[Axis.TENSOR], plan.axis_sizes[Axis.FSDP]) == (2, 2)


def test_what_no_stage_can_have_is_refused():
    cost = small_profile()
    with pytest.raises(PlanError, match="sizes of pipeline, expected of fsdp, expert, tensor"):
        search(cost, FOUR_HOSTS, axes={"pipeline": 2})
    with pytest.raises(PlanError, match=r"hosts with \[1, 2\] devices, expected as many"):
        search(cost, cluster([1.0, 1.0], devices=[1, 2]))
    with pytest.raises(PlanError, match=r"axis tensor: found 3, expected a size that small allows"):
        search(cost, FOUR_HOSTS, axes={"tensor": 3})
    small = cluster([1.0] * 4, devices=4, memory_bytes=tight_bytes(cost, 0.05))
    with pytest.raises(NoFeasiblePlan):
        search(cost, small)


def test_fsdp_divides_the_microbatches_of_an_evaluation_too():
    assert search(small_profile(), FOUR_HOSTS, axes={"tensor": 1}).axis_sizes[Axis.FSDP] == 4
    with pytest.raises(PlanError, match="an fsdp that divides 2"):
        search(small_profile(), FOUR_HOSTS, axes={"tensor": 1, "expert": 1}, shared_examples=2)
