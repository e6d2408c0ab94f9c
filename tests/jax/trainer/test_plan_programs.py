"""Programs compiled from plans: every axis runs on eight CPU devices and is compared with one device."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import resilient_jax as rj
from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.sharding.planned_program import compile_plan, make_mesh, make_state_shardings
from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.full_only import full_but
from tests.support.plan_topologies import cluster
from tests.support.planned_programs import (
    BATCH,
    MESHES,
    SHAPE,
    ExpertProgram,
    LinenProgram,
    NnxProgram,
    plan_with,
)

PROGRAMS = {"nnx": NnxProgram, "linen": LinenProgram}
STEPS = 3


@functools.cache
def get_program(name):
    """Return a program of PROGRAMS."""
    return PROGRAMS[name]()


@functools.cache
def measure(name):
    """Return the cost of a program of PROGRAMS."""
    return get_program(name).profile()


@pytest.fixture(scope="module", params=list(PROGRAMS))
def program(request):
    return get_program(request.param)


@pytest.fixture(scope="module")
def profile(program):
    return measure(program.name)


@pytest.fixture(scope="module")
def alone(program):
    """Return the state and the losses of a few steps on one device."""
    return run_steps(program, jax.jit(program.step), program.state)


def run_steps(program, step, state):
    losses = []
    for number in range(STEPS):
        state, loss = step(state, program.batch(number))
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state), losses


def name_of(axes):
    return "-".join(f"{axis}{size}" for axis, size in axes.items())


@pytest.mark.parametrize(
    "axes", full_but(MESHES, lambda axes: Axis.SEQUENCE in axes and len(axes) > 2), ids=name_of
)
def test_a_plan_trains_as_one_device_does(program, profile, alone, axes):
    plan = plan_with(profile, axes)
    compiled = compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())
    state = jax.device_put(program.state, compiled.state_shardings)
    found, losses = run_steps(
        program, lambda s, b: compiled(s, jax.device_put(b, compiled.batch_shardings)), state
    )
    assert losses == pytest.approx(alone[1], rel=1e-4)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone[0]), strict=True):
        # Adam divides by the root of small values: differences of rounding grow to a fraction of a step of 1e-2.
        np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.parametrize(
    "axes", full_but(MESHES, lambda axes: len(axes) != 1 or Axis.FSDP in axes), ids=name_of
)
def test_each_axis_shards_the_dims_that_it_is_documented_to_shard(program, profile, axes):
    plan = plan_with(profile, axes)
    mesh = make_mesh(plan, jax.devices())
    assert {axis: mesh.shape[axis] for axis in axes} == axes
    shardings = make_state_shardings(plan, program.state, mesh)
    state = jax.device_put(program.state, shardings)
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    cuts = axes.get(Axis.FSDP, 1) * axes.get(Axis.TENSOR, 1)
    assert here == pytest.approx(plan.memory.parameters + plan.memory.optimizer, rel=0.01)
    # Only norms and biases of the model's width are replicated along tensor.
    assert whole / cuts <= here <= 1.05 * whole / cuts


def test_a_plan_with_tensor_and_fsdp_has_the_collectives_of_these_axes(program, profile):
    plan = plan_with(profile, {Axis.TENSOR: 2, Axis.FSDP: 4})
    planned = compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())
    text = planned.compiled.as_text() or ""
    assert re.search(r"all-gather", text), "fsdp gathers parameters"
    assert re.search(r"all-reduce", text), "tensor adds partial sums"


def test_experts_are_sharded_over_the_expert_axis_and_train_as_on_one_device():
    program = ExpertProgram()
    plan = plan_with(program.profile(), {Axis.EXPERT: 4, Axis.REPLICA: 2})
    compiled = compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())
    assert compiled.state_shardings["params"]["up"].shard_shape((4, 32, 64)) == (1, 32, 64)
    state = jax.device_put(program.state, compiled.state_shardings)
    found, losses = run_steps(
        program, lambda s, b: compiled(s, jax.device_put(b, compiled.batch_shardings)), state
    )
    expected, expected_losses = run_steps(program, jax.jit(program.step), program.state)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.permutations(MESHES, 2)), ids=lambda axes: name_of(axes)
)
def test_resharding_between_any_two_plans_gives_the_same_global_arrays(before, after, nnx_state, nnx_profile):
    state, expected = nnx_state
    first, second = plan_with(nnx_profile, before), plan_with(nnx_profile, after)
    laid = jax.device_put(state, make_state_shardings(first, state, make_mesh(first, jax.devices())))
    moved = jax.device_put(laid, make_state_shardings(second, state, make_mesh(second, jax.devices())))
    for one, other in zip(jax.tree.leaves(moved), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.fixture(scope="module")
def nnx_state():
    state = get_program("nnx").state
    return state, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def nnx_profile():
    return measure("nnx")


def test_names_in_nnx_metadata_suffice_where_the_program_cost_is_a_closed_form():
    profile = rj.planning.analyze_transformer(SHAPE, name="closed form")
    plan = plan_with(profile, {Axis.TENSOR: 4, Axis.REPLICA: 2})
    program = get_program("nnx")
    shardings = make_state_shardings(plan, program.abstract, make_mesh(plan, jax.devices()))
    up = shardings["layers"][0]["feed_forward"]["up"]["kernel"]
    found = jax.tree.leaves(up)[0]
    assert found.shard_shape((64, 128)) == (64, 32)


def test_a_state_in_which_an_axis_shards_nothing_is_refused():
    profile = rj.planning.analyze_transformer(SHAPE, name="closed form")
    plan = plan_with(profile, {Axis.TENSOR: 4, Axis.REPLICA: 2})
    with pytest.raises(
        CallerError, match=r"found no array in the state that tensor 4 shards.*LogicalAxisRules"
    ):
        make_state_shardings(plan, {"w": np.zeros((64, 64))}, make_mesh(plan, jax.devices()))


def test_rules_name_dims_without_other_names_and_optimizer_state_follows_its_parameter():
    profile = rj.planning.analyze_transformer(SHAPE, name="closed form")
    plan = plan_with(profile, {Axis.TENSOR: 4, Axis.REPLICA: 2})
    state = {"params": {"w": np.zeros((64, 64))}, "optimizer": {"mu": {"w": np.zeros((64, 64))}}}
    naming = rj.LogicalAxisRules(names_by_path=[("w", ("embed", "mlp"))])
    shardings = make_state_shardings(plan, state, make_mesh(plan, jax.devices()), naming)
    shapes = {leaf.shard_shape((64, 64)) for leaf in jax.tree.leaves(shardings)}
    assert shapes == {(64, 16)}


CHAIN_RULES = [("w", ("embed",)), ("out/w", ("mlp", "embed")), ("in/up", ("embed", "mlp"))]
"""The pattern of the first rule is also a suffix of the second's."""


def chain(_):
    return {
        "w": np.ones((64, 64), np.float32),
        "in": {"up": np.ones((64, 128), np.float32)},
        "out": {"w": np.ones((128, 64), np.float32)},
    }


def loss_of_chain(params, rows):
    hidden = jax.numpy.tanh(rows @ params["w"] @ params["in"]["up"])
    return jax.numpy.mean((hidden @ params["out"]["w"] - rows) ** 2)


@pytest.mark.parametrize("given", [True, False], ids=["given again", "not given"])
def test_a_state_is_sharded_as_estimated_whatever_the_order_of_rules(given):
    naming = rj.LogicalAxisRules(names_by_path=CHAIN_RULES)
    rows = jax.ShapeDtypeStruct((8, 64), np.float32)
    profile = rj.planning.analyze_program(chain, loss_of_chain, rows, name="chain", logical_axis_rules=naming)
    plan = plan_with(profile, {Axis.TENSOR: 4, Axis.REPLICA: 2})
    state = chain(None)
    shardings = make_state_shardings(plan, state, make_mesh(plan, jax.devices()), naming if given else None)
    assert shardings["out"]["w"].shard_shape((128, 64)) == (32, 64)
    held = sum(
        leaf.dtype.itemsize * np.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    )
    assert held == plan.memory.parameters


def test_the_rule_of_the_longest_path_suffix_counts_where_the_program_cost_has_no_names():
    plan = plan_with(
        rj.planning.analyze_transformer(SHAPE, name="closed form"), {Axis.TENSOR: 4, Axis.REPLICA: 2}
    )
    naming = rj.LogicalAxisRules(names_by_path=CHAIN_RULES)
    state = {"params": chain(None), "optimizer": {"mu": chain(None)}}
    shardings = make_state_shardings(plan, state, make_mesh(plan, jax.devices()), naming)
    for tree in (shardings["params"], shardings["optimizer"]["mu"]):
        assert tree["out"]["w"].shard_shape((128, 64)) == (32, 64)


def test_metadata_that_an_optimizer_keeps_on_an_array_with_fewer_dims_is_ignored():
    plan = plan_with(
        rj.planning.analyze_transformer(SHAPE, name="closed form"), {Axis.TENSOR: 4, Axis.REPLICA: 2}
    )
    box = functools.partial(nn.Partitioned, names=("embed", "mlp"))
    state = {
        "kernel": box(np.zeros((64, 64))),
        "row": box(np.zeros(64)),
        "accumulators": box([np.zeros(64)] * 2),
    }
    shardings = make_state_shardings(plan, state, make_mesh(plan, jax.devices()))
    found = {
        name: {s.shard_shape((64, 64)[:n]) for s in jax.tree.leaves(shardings[name])}
        for name, n in (("kernel", 2), ("row", 1), ("accumulators", 1))
    }
    assert found == {"kernel": {(64, 16)}, "row": {(64,)}, "accumulators": {(64,)}}


def constrain_hidden(axis):
    def loss(params, rows):
        hidden = jax.numpy.tanh(rows @ params["w"] @ params["in"]["up"])
        hidden = jax.lax.with_sharding_constraint(hidden, PartitionSpec(None, axis))
        return jax.numpy.mean((hidden @ params["out"]["w"] - rows) ** 2)

    return loss


def measure_chain(loss):
    return rj.planning.analyze_program(
        chain,
        loss,
        jax.ShapeDtypeStruct((8, 64), np.float32),
        name="chain",
        logical_axis_rules=rj.LogicalAxisRules(names_by_path=CHAIN_RULES),
    )


@pytest.mark.parametrize("axes", [{Axis.TENSOR: 4, Axis.REPLICA: 2}, {Axis.TENSOR: 2, Axis.FSDP: 4}])
def test_a_bare_partition_spec_is_over_the_axes_of_the_plan(axes):
    loss = constrain_hidden("tensor")
    profile = measure_chain(loss)
    free = measure_chain(loss_of_chain)
    assert (profile.tensors, profile.forward_flops) == (free.tensors, free.forward_flops)
    rows = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    program = compile_plan(
        plan_with(profile, axes), loss, chain(None), rows, devices=jax.devices(), donate_state=False
    )
    found = program(jax.device_put(chain(None), program.state_shardings), rows)
    np.testing.assert_allclose(found, loss_of_chain(chain(None), rows), rtol=1e-5)


def test_a_partition_spec_of_another_axis_is_refused_with_those_of_a_plan():
    with pytest.raises(
        CallerError, match=r"expected replica, pipeline, fsdp, expert, sequence, tensor\. Use these"
    ):
        measure_chain(constrain_hidden("model"))


class Results(NamedTuple):
    state: Any
    loss: Any


def test_a_result_is_a_state_only_if_it_has_its_shapes():
    rows = jax.ShapeDtypeStruct((8, 64), np.float32)
    profile = rj.planning.analyze_program(
        chain,
        loss_of_chain,
        rows,
        name="chain",
        logical_axis_rules=rj.LogicalAxisRules(names_by_path=CHAIN_RULES),
    )
    plan = plan_with(profile, {Axis.TENSOR: 4, Axis.REPLICA: 2})

    def step(state, rows):
        loss, gradients = jax.value_and_grad(loss_of_chain)(state, rows)
        norms = jax.tree.map(jax.numpy.linalg.norm, gradients)
        return {"all": Results(jax.tree.map(lambda p, g: p - g, state, gradients), loss), "norms": norms}

    program = compile_plan(plan, step, chain(None), rows, devices=jax.devices(), donate_state=False)
    state = jax.device_put(chain(None), program.state_shardings)
    found = program(state, np.ones((8, 64), np.float32))
    assert isinstance(found["all"], Results)
    assert jax.tree.map(lambda leaf: leaf.sharding, found["all"].state) == program.state_shardings
    assert jax.tree.map(np.shape, found["norms"]) == {"w": (), "in": {"up": ()}, "out": {"w": ()}}


def test_a_program_of_a_state_of_one_array_returns_its_loss():
    profile = rj.planning.analyze_transformer(SHAPE, name="closed form")
    plan = plan_with(profile, {Axis.FSDP: 4, Axis.REPLICA: 2})
    program = compile_plan(
        plan,
        lambda w, rows: (w + 1, rows.sum()),
        np.zeros((64, 64), np.float32),
        np.ones((8, 64), np.float32),
        devices=jax.devices(),
    )
    weights, total = program(np.zeros((64, 64), np.float32), np.ones((8, 64), np.float32))
    assert (weights.sharding.shard_shape((64, 64)), float(total)) == ((16, 64), 512.0)


def test_a_variable_without_a_value_is_ignored():
    profile = rj.planning.analyze_transformer(SHAPE, name="closed form")
    plan = plan_with(profile, {Axis.FSDP: 4, Axis.REPLICA: 2})
    state = {"bias": nnx.Param(None), "kernel": nnx.Param(np.zeros((64, 64)))}
    shardings = make_state_shardings(plan, state, make_mesh(plan, jax.devices()))
    assert [leaf.shard_shape((64, 64)) for leaf in jax.tree.leaves(shardings)] == [(16, 64)]


def test_the_meshes_of_the_replicas_together_have_all_devices_once(nnx_profile):
    plan = plan_with(nnx_profile, {Axis.TENSOR: 2, Axis.REPLICA: 4})
    found = [make_mesh(plan, jax.devices(), replica=number) for number in range(4)]
    assert [mesh.shape["replica"] for mesh in found] == [1] * 4
    together = [device for mesh in found for device in mesh.devices.flat]
    assert together == list(make_mesh(plan, jax.devices()).devices.flat)
    with pytest.raises(CallerError, match="found replica 4, expected one from 0 to 3"):
        make_mesh(plan, jax.devices(), replica=4)


def test_tensor_groups_are_inside_hosts(nnx_profile):
    plan = plan_with(nnx_profile, {Axis.TENSOR: 2, Axis.FSDP: 2, Axis.REPLICA: 2})
    grid = make_mesh(plan, jax.devices()).devices.reshape(4, 2)
    assert all(a.id // 2 == b.id // 2 for a, b in grid), "hosts have two devices each"


def test_a_slow_host_that_is_left_out_has_no_device_in_the_mesh(nnx_profile):
    topology = cluster([1.0, 1.0, 0.05, 1.0], devices=2)
    plan = rj.planning.search_plan(
        nnx_profile, topology, global_batch=6, axes={Axis.TENSOR: 2}, number_format="bf16"
    )
    used = {device.id // 2 for device in make_mesh(plan, jax.devices()).devices.flat}
    assert 2 not in used


def test_pipelines_are_refused_at_compile_with_a_remedy(nnx_profile):
    plan = plan_with(nnx_profile, {Axis.PIPELINE: 2, Axis.REPLICA: 4})
    program = get_program("nnx")
    with pytest.raises(CallerError, match=r"found a plan with pipeline 2.*expected pipeline 1.*Trainer"):
        compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())


def test_the_wrong_number_of_devices_is_refused(nnx_profile):
    plan = plan_with(nnx_profile, {Axis.TENSOR: 2, Axis.REPLICA: 4})
    with pytest.raises(CallerError, match="found 6 devices, expected the 8 of topology made up"):
        make_mesh(plan, jax.devices()[:6])


def test_examples_that_do_not_divide_are_refused(nnx_profile):
    plan = plan_with(nnx_profile, {Axis.FSDP: 4, Axis.REPLICA: 2})
    program = get_program("nnx")
    with pytest.raises(CallerError, match=r"found the shape \(6, 32\).*replica x fsdp = 8 divides"):
        compile_plan(plan, program.step, program.state, program.batch()[:6], devices=jax.devices())


def test_a_batch_without_tokens_is_refused_where_sequences_are_sharded(nnx_profile):
    plan = plan_with(nnx_profile, {Axis.SEQUENCE: 4, Axis.REPLICA: 2})
    program = get_program("nnx")
    with pytest.raises(CallerError, match="no array whose second dim has 32 tokens"):
        compile_plan(
            plan, program.step, program.state, np.zeros((BATCH, 33), np.int32), devices=jax.devices()
        )


def test_a_compiled_program_compiles_nothing_when_it_is_called_again(nnx_profile):
    program = get_program("nnx")
    plan = plan_with(nnx_profile, {Axis.TENSOR: 2, Axis.FSDP: 2, Axis.REPLICA: 2})
    compiled = compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())
    state = jax.device_put(program.state, compiled.state_shardings)
    state, _ = compiled(state, program.batch())
    before = {leaf.sharding for leaf in jax.tree.leaves(state)}
    state, _ = compiled(state, program.batch(1))
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == before


def test_an_nnx_state_keeps_its_tree(nnx_profile):
    program = get_program("nnx")
    plan = plan_with(nnx_profile, {Axis.TENSOR: 2, Axis.REPLICA: 4})
    shardings = make_state_shardings(plan, program.abstract, make_mesh(plan, jax.devices()))
    assert isinstance(shardings, nnx.State)
    assert jax.tree.structure(shardings) == jax.tree.structure(program.abstract)
