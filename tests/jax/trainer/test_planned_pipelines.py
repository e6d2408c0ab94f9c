"""Plans with pipelines as programs in one process: the same bits for every number of stages and replicas."""

import functools

import jax
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.errors import CallerError, NonFiniteError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.sharding.planned_program import compile_plan
from tests.support.decoder import Decoder, loss_of
from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.full_only import full_but
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import cluster

SHAPE = TransformerShape(
    layers=4,
    width=32,
    heads=4,
    kv_heads=4,
    head_dim=8,
    feed_forward=64,
    vocabulary_tokens=64,
    sequence_tokens=16,
)
BATCH, STEPS, MICROBATCH = 16, 2, 2
ALONE = {"one device": {}, "tensor": {Axis.TENSOR: 2}, "fsdp": {Axis.FSDP: 2}}
LAYOUTS = [
    ("one device", {Axis.PIPELINE: 2, Axis.REPLICA: 2}),
    ("one device", {Axis.PIPELINE: 4, Axis.REPLICA: 1}),
    ("tensor", {Axis.PIPELINE: 2, Axis.TENSOR: 2, Axis.REPLICA: 2}),
    ("fsdp", {Axis.PIPELINE: 2, Axis.FSDP: 2, Axis.REPLICA: 1}),
]


def make_model(rngs):
    return Decoder(SHAPE, rngs)


def draw(step, index, rows=MICROBATCH):
    return np.random.default_rng((step, index)).integers(0, 64, (rows, 16), np.int32)


def join_batch(step, rows=MICROBATCH):
    return np.concatenate([draw(step, index, rows) for index in range(BATCH // rows)])


@functools.cache
def measure():
    tokens = jax.ShapeDtypeStruct((BATCH, SHAPE.sequence_tokens), np.int32)
    return rj.planning.analyze_program(
        make_model, loss_of, tokens, name="decoder", optimizer=optax.adam(1e-2), sequence_tokens=16
    )


def make_trainer(rows=MICROBATCH, **options):
    return rj.Trainer(
        model=make_model,
        optimizer=optax.adam(1e-2),
        loss_fn=options.pop("loss_fn", loss_of),
        data=functools.partial(draw, rows=rows),
        batch_size=BATCH,
        microbatch_size=rows,
        numerics=rj.Numerics(clip_norm=0.5),
        **options,
    )


def make_plan(axes, rows=MICROBATCH):
    """Return the best plan with these axes whose microbatches have so many rows, and its devices."""
    given = dict.fromkeys(Axis, 1) | axes
    count = int(np.prod(list(given.values())))
    topology = cluster([1.0] * max(1, count // 2), devices=min(2, count))
    microbatch = MicrobatchConfig(sequences=rows // given[Axis.FSDP])
    (plan,) = search_plans(
        measure(),
        topology,
        global_batch=BATCH,
        constraints=PlanConstraints(given, microbatch),
        number_format="bf16",
    )
    assert plan.microbatch_sequences == rows
    return plan, jax.devices()[:count]


def train(axes, rows=MICROBATCH):
    """Return variables, optimizer state and metrics after a few steps."""
    plan, devices = make_plan(axes, rows)
    program = make_trainer(rows).compile_plan(plan, devices=devices)
    state, seen = program.init(), []
    for step in range(STEPS):
        state, metrics = program(state, join_batch(step, rows))
        seen.append(metrics)
    program.close()
    return program.gather(state), seen, program, state


@functools.cache
def train_alone(name):
    return train(ALONE[name])


def check_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("alone", "axes"), full_but(LAYOUTS, lambda case: case[0] == "tensor"), ids=str)
def test_every_layout_has_the_bits_of_one_stage(eight_devices, alone, axes):
    found, seen, program, state = train(axes)
    expected, expected_seen, _, _ = train_alone(alone)
    check_equal(found, expected)
    assert seen == expected_seen
    # Each array is on the devices of its stages alone.
    per_stage = axes.get(Axis.TENSOR, 1) * axes.get(Axis.FSDP, 1)
    for unit in state.units[1:-1]:
        for leaf in jax.tree.leaves(unit):
            assert len(leaf.sharding.device_set) == axes[Axis.REPLICA] * per_stage
    assert program.cut.count("->") == axes[Axis.REPLICA] * (axes[Axis.PIPELINE] - 1)


@pytest.mark.full
def test_a_plan_has_the_bits_of_a_trainer_with_the_same_axes(eight_devices):
    rows = 8
    trainer = make_trainer(
        rows,
        parallelism=rj.Parallelism(
            pipeline=rj.Pipeline(num_stages=2, axis_sizes={"tensor": 2, "fsdp": 4}, gather_result=True)
        ),
    )
    result = trainer.fit(STEPS)
    (variables, _), seen, _, _ = train({Axis.TENSOR: 2, Axis.FSDP: 4}, rows)
    check_equal(variables.params, result.params)
    assert seen[-1]["loss"] == result.metrics["loss"]


@pytest.mark.parametrize("donate_state", full_but([True, False], bool))
def test_a_step_that_fails_leaves_its_state_as_it_is_and_the_next_one_runs(eight_devices, donate_state):
    def broken_loss(model, tokens):
        return loss_of(model, tokens) / jax.numpy.where(tokens[0, 0] == 63, 0.0, 1.0)

    plan, devices = make_plan({Axis.PIPELINE: 2, Axis.REPLICA: 2})
    trainer = make_trainer(loss_fn=broken_loss)
    program = trainer.compile_plan(plan, devices=devices, donate_state=donate_state)
    state = program.init()
    batch = np.minimum(join_batch(0), 62)
    expected, metrics = program(program.init(), batch)
    bad = batch.copy()
    bad[0, 0] = 63
    with pytest.raises(NonFiniteError):
        program(state, bad)
    again, same = program(state, batch)
    check_equal(jax.device_get(again), jax.device_get(expected))
    assert same == metrics
    # Only a step that is committed takes the memory of its state.
    assert all(leaf.is_deleted() == donate_state for leaf in jax.tree.leaves(state.units))
    if not donate_state:
        check_equal(jax.device_get(program(state, batch)[0]), jax.device_get(expected))
    state = again
    for leaf in jax.tree.leaves(expected.units[0]):
        leaf.delete()
    # Not all stages have that unit; none of them waits for one that cannot begin.
    with pytest.raises(RuntimeError, match="deleted"):
        program(expected, batch)
    with pytest.raises(CallerError, match=r"found the shape \(8, 16\), expected 16 examples"):
        program(state, batch[:8])
    program.close()


def test_what_a_pipeline_cannot_do_is_refused_by_name(eight_devices):
    plan, devices = make_plan({Axis.PIPELINE: 2, Axis.SEQUENCE: 2})
    with pytest.raises(CallerError, match=r"found a plan with sequence 2 .* expected sequence 1"):
        make_trainer().compile_plan(plan, devices=devices)
    plan, devices = make_plan({Axis.PIPELINE: 2})
    with pytest.raises(CallerError, match=r"found a trainer with microbatch_size=4"):
        make_trainer(4).compile_plan(plan, devices=devices)
    with pytest.raises(CallerError, match=r"pipeline 2.*Use rj.Trainer\(...\).compile_plan"):
        compile_plan(plan, lambda state, batch: state, {}, {}, devices=devices)
