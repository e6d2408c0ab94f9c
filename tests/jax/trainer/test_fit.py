"""The trainer's loop on one machine: results, reports, checkpoints, and errors."""

import contextlib
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError, NonFiniteError, StateError
from resilient_jax.protocol.failpoints import Corruption
from resilient_jax.trainer.fit_loop import FitLoop
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.training_control import GenerationEnded
from tests.support.standalone_world import make_world

ROWS = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
EXAMPLES = [{"x": row, "y": row.sum(keepdims=True)} for row in ROWS]


def linear(key):
    return {"w": jax.random.normal(key, (3, 1))}


def squared(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def make_trainer(**changes):
    defaults = {
        "model": linear,
        "optimizer": optax.adam(0.05),
        "loss_fn": squared,
        "data": EXAMPLES,
        "batch_size": 16,
        "microbatch_size": 4,
    }
    return rj.Trainer(**{**defaults, **changes})


def test_the_loss_goes_down_and_the_result_is_the_trained_model():
    result = make_trainer().fit(60)
    assert result.step == 60
    assert result.metrics["loss"] < 0.05
    assert isinstance(result.params["w"], np.ndarray)
    assert result.params_sha256 == rj.digest_tree(result.params)
    assert result.stop_reason is None


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_frozen_parameters_keep_their_values_and_have_no_optimizer_state(state):
    def two(key):
        return {"body": jax.random.normal(key, (3, 3)), "head": jnp.ones((3, 1))}

    def loss(params, batch):
        assert params["body"].dtype == params["head"].dtype == jnp.bfloat16
        return squared({"w": params["body"] @ params["head"]}, batch)

    seen = []
    trainer = make_trainer(
        model=two,
        loss_fn=loss,
        wrt=lambda path, value: "head" in path,
        numerics=rj.Numerics(compute_dtype=jnp.bfloat16),
        parallelism=rj.Parallelism(state=state),
        callbacks=[lambda report: seen.append(len(jax.tree.leaves(report.state.opt_state)))],
    )
    result = trainer.fit(3)
    np.testing.assert_array_equal(result.model["body"], jax.random.normal(jax.random.key(0), (3, 3)))
    assert (result.model["head"] != 1).all()
    assert list(result.params) == ["head"]
    assert seen == [3] * 3  # count, mu and nu of the head


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_the_average_of_the_parameters_is_that_of_their_history_and_can_be_evaluated(state):
    history, seen = [np.zeros((3, 1), np.float32)], {}

    def remember(report):
        if report.is_evaluation:
            seen.update(report.metrics)
        else:
            history.append(np.asarray(report.state.variables.params["w"]))

    trainer = make_trainer(
        model=lambda key: {"w": jnp.zeros((3, 1))},
        numerics=rj.Numerics(ema_decay=0.75),
        parallelism=rj.Parallelism(state=state),
        evaluation=rj.Evaluation(data=EXAMPLES, interval_steps=100, use_ema=True),
        callbacks=[remember],
    )
    result = trainer.fit(4)
    average = history[0]
    for params in history[1:]:
        average = 0.75 * average + 0.25 * params
    assert result.ema_params is not None
    np.testing.assert_allclose(result.ema_params["w"], average, rtol=1e-6)
    np.testing.assert_array_equal(result.ema_model["w"], result.ema_params["w"])
    assert not np.allclose(result.params["w"], average)
    loss = ((ROWS @ average - ROWS.sum(1, keepdims=True)) ** 2).mean()
    assert seen["eval_loss"] == pytest.approx(loss, rel=1e-5)


def constrain_to(axis):
    def loss(params, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], jax.sharding.PartitionSpec(axis, None))
        return squared(params, {**batch, "x": x})

    return loss


def test_a_bare_partition_spec_is_over_the_mesh_of_the_replica():
    evaluation = rj.Evaluation(data=EXAMPLES, interval_steps=1)
    shape = rj.ReplicaShape(axes=(("rows", len(jax.devices())),))
    one, other = (
        make_trainer(loss_fn=loss_fn, evaluation=evaluation, numerics=rj.Numerics(remat=True), **changes).fit(
            2
        )
        for loss_fn, changes in (
            (constrain_to("rows"), {"parallelism": rj.Parallelism(replica_shape=shape)}),
            (constrain_to("data"), {}),
        )
    )
    assert one.params_sha256 == other.params_sha256 == make_trainer().fit(2).params_sha256


def test_an_axis_that_the_mesh_of_the_replica_does_not_have_is_refused():
    said = r"axis: model of .*expected data\. Use these, or, without a plan, name others: rj\.Parallelism"
    with pytest.raises(CallerError, match=said):
        make_trainer(loss_fn=constrain_to("model")).fit(1)
    evaluation = rj.Evaluation(data=EXAMPLES, interval_steps=1, loss_fn=constrain_to("model"))
    with pytest.raises(CallerError, match=said):
        make_trainer(evaluation=evaluation).fit(1)


def test_a_collective_over_a_named_axis_is_refused():
    with pytest.raises(CallerError, match=r"unbound axis name: batch.*Remove axis_name= and jax\.lax\.pmean"):
        make_trainer(loss_fn=lambda p, b: jax.lax.pmean(squared(p, b), "batch")).fit(1)


def test_constructing_a_trainer_calls_neither_model_nor_loss():
    def never(*_):
        raise AssertionError

    make_trainer(model=lambda key: never(), loss_fn=never)


def test_the_same_recipe_gives_the_same_bits_and_another_seed_other_bits():
    one, same, other = (make_trainer(seed=seed).fit(3).params_sha256 for seed in (1, 1, 2))
    assert one == same != other


def test_the_learning_rate_follows_the_schedule_by_steps():
    """Check that the schedule does not depend on the number of microbatches in a step."""
    seen = []
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.0})
    make_trainer(
        optimizer=optax.sgd(schedule),
        loss_fn=lambda params, batch: params["w"].sum() + 0 * squared(params, batch),
        callbacks=[lambda report: seen.append(float(report.state.variables.params["w"][0, 0]))],
    ).fit(4)
    assert np.diff(seen).round(5).tolist() == [-1.0, 0.0, 0.0]


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_an_injected_learning_rate_is_a_metric_of_the_step_that_used_it(state):
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.5})
    inject = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    seen = []
    make_trainer(
        optimizer=optax.chain(optax.clip(1.0), inject),
        parallelism=rj.Parallelism(state=state),
        callbacks=[lambda report: seen.append(report.metrics["learning_rate"])],
    ).fit(3)
    assert seen == [1.0, 1.0, 0.5]


def test_each_microbatch_is_read_with_its_own_step_and_index():
    read = []

    def batch(step, index):
        read.append((step, index))
        return {"x": np.ones((4, 3), np.float32), "y": np.full((4, 1), step, np.float32)}

    make_trainer(data=batch).fit(3)
    assert set(read) >= {(step, index) for step in range(3) for index in range(4)}


def test_a_callback_is_called_for_every_step_and_can_stop_training():
    seen = []

    def stop_at_five(report):
        seen.append((report.step, sorted(report.metrics)))
        return report.step == 5

    result = make_trainer(callbacks=[stop_at_five]).fit(100)
    assert seen == [(step, ["grad_norm", "loss"]) for step in range(1, 6)]
    assert (result.step, result.stop_reason) == (5, "a callback returned True after step 5")


@pytest.mark.parametrize("answer", [np.True_, jnp.array(True), np.array(True)])
def test_a_callback_stops_training_with_any_truth_value(answer):
    result = make_trainer(callbacks=[lambda report: answer if report.step == 3 else None]).fit(6)
    assert result.step == 3


@pytest.mark.parametrize("answer", [1, 0.5, "stop", {"loss": 1}, np.array([True])])
def test_a_callback_that_returns_something_else_is_refused(answer):
    with pytest.raises(CallerError, match=r"callback .*expected True to stop training, or None or\s+False"):
        make_trainer(callbacks=[lambda report: answer]).fit(2)


def test_an_evaluation_that_a_failure_repeats_is_reported_once():
    """The first generation ends in the step after it."""
    reports, committed = [], CommittedState()
    evaluation = rj.Evaluation(data=EXAMPLES, interval_steps=2)
    trainer = make_trainer(
        evaluation=evaluation, callbacks=[lambda r: reports.append((r.step, r.is_evaluation))]
    )
    loop = FitLoop(dataclasses.replace(trainer._config, num_steps=4), None)

    class EndsInStep2:
        def on_reduce(self, call, owners, total):
            if (call.spec.name, call.spec.step) == ("train", 2):
                raise GenerationEnded

        def on_failpoint(self, failpoint, step, index):
            return Corruption.NONE

        def __getattr__(self, name):
            return lambda *arguments: None

    with contextlib.closing(loop):
        with pytest.raises(GenerationEnded):
            loop.run_generation(make_world(committed=committed, observers=[EndsInStep2()], generation=1))
        assert reports == [(1, False), (2, False), (2, True)]
        loop.run_generation(make_world(committed=committed, generation=2))
    assert reports == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    assert loop.result is not None
    assert "eval_loss" in loop.result.metrics


def test_the_evaluation_is_the_mean_over_its_data_before_the_steps_that_are_due_and_at_the_end():
    found = {}

    def keep(report):
        if report.is_evaluation:
            params = jax.device_get(report.state.variables.params)
            found[report.step] = report.metrics["eval_loss"], float(squared(params, WHOLE))

    make_trainer(evaluation=rj.Evaluation(data=EXAMPLES, interval_steps=2), callbacks=[keep]).fit(5)
    assert list(found) == [2, 4, 5]
    for evaluated, expected in found.values():
        assert evaluated == pytest.approx(expected, rel=1e-5)


WHOLE = {name: np.stack([example[name] for example in EXAMPLES]) for name in ("x", "y")}


def test_an_evaluation_reads_the_same_data_each_time_and_may_have_its_own_loss():
    values = []

    def label(params, batch):
        return 0 * squared(params, batch) + batch["x"][0, 0], {"count": len(batch["x"])}

    make_trainer(
        evaluation=rj.Evaluation(
            data=EXAMPLES, interval_steps=1, microbatch_size=2, num_microbatches=3, loss_fn=label
        ),
        callbacks=[lambda report: values.append(dict(report.metrics)) if report.is_evaluation else None],
    ).fit(3)
    expected = {"eval_loss": pytest.approx(float(ROWS[[0, 2, 4], 0].mean())), "eval_count": 2}
    assert values == [expected] * 3


def test_an_nnx_model_is_evaluated_without_dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dropout, self.linear = nnx.Dropout(0.9, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.dropout(x))

    losses = []
    make_trainer(
        model=Net,
        optimizer=optax.sgd(0.0),
        loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        evaluation=rj.Evaluation(data=EXAMPLES, interval_steps=1),
        callbacks=[lambda report: losses.append(report.metrics.get("eval_loss", report.metrics.get("loss")))],
    ).fit(3)
    steps, evaluations = [losses[0], losses[2], losses[4]], [losses[1], losses[3], losses[5]]
    assert len(set(steps)) == 3
    assert len(set(evaluations)) == 1


def test_early_stopping_ends_training_when_patience_is_exhausted():
    result = make_trainer(
        optimizer=optax.sgd(0.0),
        evaluation=rj.Evaluation(data=EXAMPLES, interval_steps=2),
        early_stopping=rj.EarlyStopping(patience=3),
    ).fit(100)
    assert result.step == 8  # the best at 2; no better at 4, 6, 8
    assert result.stop_reason is not None
    assert "eval_loss has not improved on" in result.stop_reason


def test_the_log_has_a_json_line_for_each_step_and_evaluation(tmp_path):
    make_trainer(evaluation=rj.Evaluation(data=EXAMPLES, interval_steps=2), log_directory=tmp_path).fit(2)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], "eval_loss" in line) for line in lines] == [(1, False), (2, False), (2, True)]
    assert all(line["duration_s"] > 0 for line in lines)
    assert file.name == "localhost.jsonl"


# Non-finite microbatches.


def poison(step, index):
    x = np.ones((4, 3), np.float32)
    return {"x": x * (np.nan if (step, index) == (2, 1) else 1), "y": np.ones((4, 1), np.float32)}


def test_a_non_finite_microbatch_stops_training_before_its_step_is_committed():
    steps = []
    trainer = make_trainer(data=poison, callbacks=[lambda report: steps.append(report.step)])
    with pytest.raises(NonFiniteError, match=r"step 2: .*microbatches 1 \(host localhost\)") as found:
        trainer.fit(5)
    assert (found.value.step, found.value.microbatch, found.value.host) == (2, 1, "localhost")
    assert steps == [1, 2]


@pytest.mark.parametrize(("policy", "said"), [("skip", "left out"), ("warn", "used as they are")])
def test_a_non_finite_microbatch_can_be_skipped_or_used_with_a_warning(policy, said, caplog):
    result = make_trainer(data=poison, numerics=rj.Numerics(non_finite=policy)).fit(5)
    assert math.isfinite(result.metrics["loss"]) == (policy == "skip")
    assert f"1 (host localhost); {said}" in caplog.text


def test_a_step_without_a_finite_microbatch_stops_training_even_when_skipping():
    def nothing(step, index):
        return {"x": np.full((4, 3), np.inf, np.float32), "y": np.ones((4, 1), np.float32)}

    with pytest.raises(NonFiniteError, match="step 0"):
        make_trainer(data=nothing, numerics=rj.Numerics(non_finite="skip")).fit(1)


def test_the_treatment_of_batch_stats_is_logged_once(caplog):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.norm(x))

    make_trainer(model=Net, loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)).fit(
        2
    )
    assert caplog.text.count("keeps statistics over the examples") == 1
    assert "the mean over the 4 microbatches of a step" in caplog.text


# Checkpoints.


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    def recipe(**changes):
        noisy = optax.chain(optax.add_noise(0.01, 0.5, 0), optax.adam(0.05))  # its state has a random key
        return make_trainer(optimizer=noisy, **changes)

    checkpoints = rj.Checkpoints(directory=tmp_path, interval_steps=2, max_to_keep=2)
    recipe(checkpoints=checkpoints).fit(5)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 2
    assert "5" in names
    steps = []
    resumed = recipe(checkpoints=checkpoints, callbacks=[lambda report: steps.append(report.step)]).fit(7)
    assert steps == [6, 7]
    assert resumed.params_sha256 == recipe().fit(7).params_sha256


def test_an_unfinished_checkpoint_is_not_resumed_and_is_removed(tmp_path):
    checkpoints = rj.Checkpoints(directory=tmp_path, interval_steps=2)
    make_trainer(checkpoints=checkpoints).fit(2)
    (tmp_path / "9.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "8").mkdir()
    assert make_trainer(checkpoints=checkpoints).fit(4).step == 4
    assert not (tmp_path / "9.orbax-checkpoint-tmp-1").exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"model": lambda key: {"w": jnp.zeros((3, 1)), "more": jnp.zeros(3)}},
        {"model": lambda key: {"w": jnp.zeros((3, 2))}},
        {"optimizer": optax.sgd(0.1, momentum=0.9)},
    ],
    ids=["another tree", "another shape", "another optimizer"],
)
def test_a_checkpoint_of_another_recipe_is_refused(changed, tmp_path):
    checkpoints = rj.Checkpoints(directory=tmp_path)
    make_trainer(checkpoints=checkpoints).fit(1)
    with pytest.raises(StateError, match=r"checkpoint .*Train with the recipe that saved it"):
        make_trainer(checkpoints=checkpoints, **changed).fit(2)


# Bad input.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 18}, "batch_size: found 18 with microbatch_size 4"),
        ({"batch_size": 0}, "expected a positive multiple"),
        ({"microbatch_size": 0}, "expected a positive multiple"),
        ({"batch_size": 8.0}, r"batch_size: found 8\.0 \(float\), expected an integer"),
        ({"batch_size": "8"}, r"batch_size: found '8' \(str\), expected an integer"),
        ({"microbatch_size": 4.0}, r"microbatch_size: found 4\.0 \(float\), expected an integer"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 1.5}, r"seed: found 1\.5 \(float\), expected an integer"),
        ({"seed": None}, r"seed: found None \(NoneType\), expected an integer"),
        ({"loss_fn": 3}, r"loss_fn: found 3 \(int\), expected loss_fn"),
        ({"wrt": lambda path, value: True, "planner": rj.Planner(topology="none")}, "together with planner"),
        ({"early_stopping": rj.EarlyStopping()}, "found no evaluation, expected one"),
        (
            {
                "early_stopping": rj.EarlyStopping(metric="loss"),
                "evaluation": rj.Evaluation(data=EXAMPLES, interval_steps=1),
            },
            "expected one of the evaluation",
        ),
    ],
    ids=[
        *("not a multiple", "no batch", "no microbatch", "a batch of a float", "a batch of a text"),
        *(
            "a microbatch of a float",
            "seed",
            "a seed of a float",
            "no seed",
            "loss",
            "a filter and a planner",
            "no evaluation",
            "no metric of it",
        ),
    ],
)
def test_wrong_arguments_are_refused_when_the_trainer_is_constructed(wrong, said):
    with pytest.raises(CallerError, match=said):
        make_trainer(**wrong)


def test_a_number_of_steps_that_is_no_integer_is_refused():
    with pytest.raises(CallerError, match=r"num_steps: found 1\.5 \(float\), expected an integer"):
        make_trainer().fit(1.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"data": EXAMPLES[:10]}, "found 10 examples, expected a multiple of the microbatch size 4"),
        ({"data": lambda step, index: EXAMPLES[0]}, "expected num_microbatches=, how many"),
    ],
    ids=["a rest", "no length"],
)
def test_an_evaluation_of_a_fractional_or_unknown_number_of_microbatches_is_refused(wrong, said):
    with pytest.raises(CallerError, match=said):
        make_trainer(evaluation=rj.Evaluation(interval_steps=1, **wrong)).fit(1)


@pytest.mark.parametrize(
    "wrong", [{"interval_steps": 0}, {"interval_steps": 1, "num_microbatches": 0}], ids=["interval", "count"]
)
def test_an_invalid_evaluation_is_refused(wrong):
    with pytest.raises(CallerError, match="expected at least 1"):
        rj.Evaluation(data=EXAMPLES, **wrong)


def test_invalid_checkpoint_options_are_refused(tmp_path):
    with pytest.raises(CallerError, match="found interval_steps=0"):
        rj.Checkpoints(directory=tmp_path, interval_steps=0)


def test_the_error_of_early_stopping_by_an_unknown_metric_names_the_known_ones():
    with pytest.raises(CallerError, match="found the metrics eval_loss, expected 'eval_accuracy'"):
        make_trainer(
            evaluation=rj.Evaluation(data=EXAMPLES, interval_steps=1),
            early_stopping=rj.EarlyStopping(metric="eval_accuracy"),
        ).fit(2)


def test_an_exception_of_a_callback_passes_unchanged():
    error = LookupError("mine")

    def fail(report):
        raise error

    with pytest.raises(LookupError) as found:
        make_trainer(callbacks=[fail]).fit(2)
    assert found.value is error


def test_the_result_of_a_model_with_a_random_key_is_numpy_arrays():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)
            self.key = nnx.Variable(rngs.noise())

        def __call__(self, x):
            return self.linear(x)

    result = make_trainer(
        model=Noisy, loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    ).fit(2)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(result.variables))


def test_complex_parameters_get_both_parts_of_the_gradient():
    goal = 1 + 2j

    def loss(params, batch):
        return jnp.abs(params["z"] - goal) ** 2 + 0 * batch["x"].mean()

    def conjugate(updates, state, params=None):
        return jax.tree.map(jnp.conj, updates), state

    downhill = optax.chain(optax.GradientTransformation(lambda params: (), conjugate), optax.sgd(0.1))
    trainer = make_trainer(
        model=lambda key: {"z": jnp.zeros((), jnp.complex64)}, optimizer=downhill, loss_fn=loss
    )
    assert abs(trainer.fit(60).params["z"] - goal) < 1e-3
