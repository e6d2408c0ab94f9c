"""The trainer with a model that is cut into blocks, on one host: the training of the whole model, and its state."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_decoders import MAKERS, NnxDecoder, cross_entropy, make_batch

import resilient_jax as rj
from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.errors import CallerError
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.trainer.unit_states import UnitStates

STEPS = 3
OPTIMIZER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
PIPELINE = rj.Parallelism(pipeline=rj.Pipeline(num_stages=2))


def draw(step, index):
    return make_batch(100 * step + index)


def make_trainer(reports=None, **options):
    return rj.Trainer(
        model=lambda rngs: NnxDecoder(jnp.float32, rngs),
        optimizer=options.pop("optimizer", OPTIMIZER),
        loss_fn=lambda model, batch: cross_entropy(model(batch["x"]), batch),
        data=draw,
        batch_size=4,
        microbatch_size=2,
        numerics=options.pop("numerics", rj.Numerics(clip_norm=0.5, ema_decay=0.5)),
        callbacks=[] if reports is None else [lambda report: reports.append(report.metrics)],
        **options,
    )


def trace_units(decoder, optimizer):
    cut = cut_model(decoder.loss, decoder.variables, make_batch(), jax.random.key(0))
    abstract = jax.eval_shape(lambda: (decoder.variables, optimizer.init(decoder.variables)))
    return UnitStates(list_state_units(cut), optimizer, *abstract)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the trainer makes of the whole model, and of the model in blocks, with the metrics of each step."""
    found = {}
    for name, parallelism in (("whole", rj.Parallelism()), ("blocks", PIPELINE)):
        reports = []
        folder = tmp_path_factory.mktemp(name)
        checkpoints = rj.Checkpoints(directory=folder, save_interval_steps=STEPS)
        result = make_trainer(reports, parallelism=parallelism, checkpoints=checkpoints).fit(STEPS)
        found[name] = (result, reports, folder)
    return found


def test_blocks_train_as_the_whole_model_does(trained):
    (whole, of_whole, _), (blocks, of_blocks, _) = trained["whole"], trained["blocks"]
    assert len(of_blocks) == STEPS
    for one, other in zip(of_whole, of_blocks, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    for one, other in ((whole.params, blocks.params), (whole.ema_params, blocks.ema_params)):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3)
    assert isinstance(blocks.model, NnxDecoder)


@pytest.mark.parametrize(("saved", "resumed"), [("blocks", rj.Parallelism()), ("whole", PIPELINE)])
def test_a_checkpoint_has_the_layout_of_the_whole_model(trained, saved, resumed):
    result, _, folder = trained[saved]
    again = make_trainer(
        parallelism=resumed, checkpoints=rj.Checkpoints(directory=folder, save_interval_steps=STEPS)
    ).fit(STEPS)
    assert again.step == STEPS
    for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(trained, tmp_path):
    shutil.copytree(trained["blocks"][2], tmp_path / "copy")
    checkpoints = rj.Checkpoints(directory=tmp_path / "copy", save_interval_steps=STEPS)
    resumed = make_trainer(parallelism=PIPELINE, checkpoints=checkpoints).fit(STEPS + 1)
    undisturbed = make_trainer(parallelism=PIPELINE).fit(STEPS + 1)
    assert resumed.params_sha256 == undisturbed.params_sha256


@pytest.mark.parametrize("kind", MAKERS)
def test_the_state_of_all_units_is_that_of_the_model(kind):
    decoder = MAKERS[kind]()
    state = OPTIMIZER.init(decoder.variables)
    units = trace_units(decoder, OPTIMIZER)
    parts = {number: units.init_unit(number, decoder.variables) for number in range(len(units.units))}
    joined = units.join(jnp.zeros((), jnp.int32), parts, ())
    for a, b in zip(
        jax.tree.leaves((joined.variables.params, joined.opt_state)),
        jax.tree.leaves((decoder.variables, state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    for number, part in parts.items():
        split = units.split(number, joined)
        assert jax.tree.structure(split) == jax.tree.structure(part)
        for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(part), strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_optimizer_that_looks_across_layers_is_refused_by_name():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(CallerError, match=r"the update of \[.* depends on the gradient of \[.*clip_norm="):
        make_trainer(parallelism=PIPELINE, optimizer=optimizer).fit(1)


@pytest.mark.parametrize("make", [optax.lamb, optax.lars])
def test_an_optimizer_with_norms_of_arrays_is_refused_where_a_scan_stacks_layers(make):
    trace_units(MAKERS["linen"](), make(1e-3))
    trace_units(MAKERS["scan"](), optax.adamw(1e-3))
    with pytest.raises(
        CallerError, match=r"\['layers'\].* element by element, expected so of parameters stacked"
    ):
        trace_units(MAKERS["scan"](), make(1e-3))


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def test_what_a_pipeline_cannot_do_is_refused_by_name():
    with pytest.raises(CallerError, match="variables of the kinds BatchStat"):
        rj.Trainer(
            model=Normalized,
            optimizer=OPTIMIZER,
            loss_fn=lambda model, batch: jnp.mean(model(batch["x"])),
            data={"x": np.ones((8, 3), np.float32)},
            batch_size=4,
            microbatch_size=2,
            parallelism=PIPELINE,
        ).fit(1)
    with pytest.raises(CallerError, match='non_finite="skip"'):
        make_trainer(parallelism=PIPELINE, numerics=rj.Numerics(non_finite="skip")).fit(1)
    with pytest.raises(CallerError, match='reduction="fast"'):
        make_trainer(parallelism=rj.Parallelism(pipeline=rj.Pipeline(num_stages=2), reduction="fast")).fit(1)
    with pytest.raises(CallerError, match="with a pipeline, expected neither"):
        rj.Parallelism(pipeline=rj.Pipeline(num_stages=2), state="sharded")
    with pytest.raises(CallerError, match="schedule='fast'"):
        rj.Pipeline(num_stages=2, schedule="fast")
    with pytest.raises(CallerError, match="num_stages=0"):
        rj.Pipeline(num_stages=0)


def test_a_loss_that_is_not_finite_stops_training():
    trainer = rj.Trainer(
        model=lambda rngs: NnxDecoder(jnp.float32, rngs),
        optimizer=OPTIMIZER,
        loss_fn=lambda model, batch: cross_entropy(model(batch["x"]), batch)[0] / 0.0,
        data=draw,
        batch_size=4,
        microbatch_size=2,
        parallelism=PIPELINE,
    )
    with pytest.raises(rj.NonFiniteError, match="step 0: found a loss of"):
        trainer.fit(1)
