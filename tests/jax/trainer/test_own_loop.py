"""The steps of a trainer in a loop of the user's: what `fit` trains, with and without a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.errors import CallerError
from tests.support.full_only import full_but
from tests.support.small_decoders import NnxDecoder, cross_entropy, make_batch

STEPS = 3
PARALLELISMS = {
    "whole": rj.Parallelism(),
    "sharded": rj.Parallelism(state="sharded"),
    "pipeline": rj.Parallelism(pipeline=rj.Pipeline(num_stages=2, gather_result=True)),
}


def draw(step, index):
    return make_batch(100 * step + index)


def make_trainer(**options):
    return rj.Trainer(
        model=lambda rngs: NnxDecoder(jnp.float32, rngs),
        optimizer=optax.adamw(1e-2),
        loss_fn=lambda model, batch: cross_entropy(model(batch["x"]), batch),
        data=draw,
        batch_size=4,
        microbatch_size=2,
        numerics=rj.Numerics(clip_norm=0.5),
        **options,
    )


def run_own(trainer, num_steps=STEPS):
    """Return the result of a loop of one's own, and what each step returned."""
    seen, results = [], []

    def train(world, train_step):
        state = train_step.restore_or_init()
        for step in world.steps(num_steps):
            state, metrics = train_step(state, step)
            world.commit(state, **metrics)
            train_step.save(state)
            seen.append((step, metrics))
        results.append(train_step.finish(state))

    trainer.run(train)
    return results[0], seen


@pytest.mark.parametrize("kind", full_but(PARALLELISMS, lambda kind: kind != "whole"))
def test_a_loop_of_ones_own_has_the_bits_of_fit(kind):
    expected = make_trainer(parallelism=PARALLELISMS[kind]).fit(STEPS)
    found, seen = run_own(make_trainer(parallelism=PARALLELISMS[kind]))
    assert [step for step, _ in seen] == list(range(STEPS))
    assert found.step == STEPS
    assert found.metrics["loss"] == seen[-1][1]["loss"] == expected.metrics["loss"]
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", full_but(PARALLELISMS, "pipeline".__eq__))
def test_a_state_that_a_step_has_donated_is_refused_by_every_call(kind):
    def train(world, train_step):
        first = state = train_step.restore_or_init()
        for step in world.steps(2):
            if state is not first:
                assert all(leaf.is_deleted() for leaf in list_arrays(first))
                for call in (lambda: train_step(first, 1), lambda: train_step.evaluate(first)):
                    with pytest.raises(
                        CallerError, match="was deleted, expected the state that the last step"
                    ):
                        call()
            state, _ = train_step(state, step)
            world.commit(state)

    def list_arrays(state):
        return jax.tree.leaves(state.units if kind == "pipeline" else state)

    make_trainer(parallelism=PARALLELISMS[kind]).run(train)


def test_a_pipeline_takes_no_state_of_another_step():
    def train(world, train_step):
        train_step(train_step.restore_or_init(), 1)

    with pytest.raises(CallerError, match="step 1: found a state after 0 steps, expected the one after 1"):
        make_trainer(parallelism=PARALLELISMS["pipeline"]).run(train)


def test_its_checkpoints_are_those_of_fit(tmp_path):
    checkpoints = rj.Checkpoints(directory=tmp_path, interval_steps=STEPS)
    options = {"parallelism": PARALLELISMS["pipeline"], "checkpoints": checkpoints}
    run_own(make_trainer(**options))
    resumed, seen = run_own(make_trainer(**options), STEPS + 1)
    assert [step for step, _ in seen] == [STEPS]
    assert (
        resumed.params_sha256 == make_trainer(parallelism=options["parallelism"]).fit(STEPS + 1).params_sha256
    )


def test_it_evaluates_when_it_likes():
    data = {name: np.concatenate([make_batch(900 + one)[name] for one in range(2)]) for name in ("x", "y")}
    evaluation = rj.Evaluation(data=data, interval_steps=STEPS)
    trainer = make_trainer(parallelism=PARALLELISMS["pipeline"], evaluation=evaluation)
    found = []

    def train(world, train_step):
        found.append(train_step.evaluate(train_step.restore_or_init()))

    trainer.run(train)
    assert found[0]["eval_loss"] > 0


def test_what_only_fit_does_is_refused_by_name():
    def train(world, train_step):
        train_step({}, 0)

    with pytest.raises(CallerError, match=r"callbacks: found it in a trainer with a loop of your own"):
        make_trainer(callbacks=[print]).run(train)
    with pytest.raises(CallerError, match=r"before train_step.restore_or_init\(\)"):
        make_trainer().run(train)

    def evaluate(world, train_step):
        train_step.evaluate(train_step.restore_or_init())

    with pytest.raises(CallerError, match=r"a trainer without an evaluation"):
        make_trainer().run(evaluate)
