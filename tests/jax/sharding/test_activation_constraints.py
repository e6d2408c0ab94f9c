"""FSDP gathers parameters and not examples: activations stay sharded by them."""

import re

import jax
import numpy as np
import pytest

import resilient_jax as rj
from resilient_jax.planning.axes import Axis
from resilient_jax.sharding.activation_constraints import constrain_activations
from resilient_jax.sharding.planned_program import compile_plan
from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.planned_programs import BATCH, SHAPE, LinenProgram, NnxProgram, plan_with

COST = rj.planning.analyze_transformer(SHAPE, name="closed form")
"""Enough for plans with given axes: to measure a program would take longer than the rest of a test."""


@pytest.mark.parametrize("is_partitionable", [False, True])
def test_random_bits_are_generated_as_the_function_configures(is_partitionable):
    def noise(state, batch):
        with jax.threefry_partitionable(is_partitionable):
            return jax.random.bits(jax.random.key(state), batch.shape)

    mesh = jax.make_mesh((8,), ("fsdp",))
    batch = np.zeros((8, 3), np.float32)
    held = jax.jit(constrain_activations(noise, mesh))(1, batch)
    np.testing.assert_array_equal(held, jax.jit(noise)(1, batch))


@pytest.mark.parametrize("program", [NnxProgram(), LinenProgram()], ids=["nnx", "linen"])
def test_fsdp_gathers_parameters_and_no_device_has_all_examples(program):
    plan = plan_with(COST, {Axis.FSDP: 8})
    planned = compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())
    text = planned.compiled.as_text() or ""
    floats = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
    tokens = program.sequence_tokens
    assert any(shape[:2] == (1, tokens) for shape in floats), "a device has its one example"
    # The lookup in a table that is cut by features has an eighth of each example: of all arrays the only one.
    lookup = (BATCH, tokens, SHAPE.width // 8)
    whole = {shape for shape in floats if len(shape) >= 3 and shape[:2] == (BATCH, tokens)} - {lookup}
    assert not whole, "activations of all examples"


def test_a_rematerialized_program_trains_as_before_under_fsdp():
    program = LinenProgram(remat=True)
    plan = plan_with(COST, {Axis.FSDP: 4, Axis.REPLICA: 2})
    compiled = compile_plan(plan, program.step, program.state, program.batch(), devices=jax.devices())
    state = jax.device_put(program.state, compiled.state_shardings)
    _, loss = compiled(state, program.batch())
    _, expected = jax.jit(program.step)(program.state, program.batch())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
