"""The trainer with a model that is cut into blocks, on one host: the training of the whole model, and its state."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.errors import CallerError
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.index_box import whole_box
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.unit_states import UnitStates
from tests.support.full_only import full_but
from tests.support.small_decoders import MAKERS, NnxDecoder, cross_entropy, make_batch, make_mask

STEPS = 3
EVALUATED_STEPS = 2
OPTIMIZER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), eps=1e-4)
"""With Adam's usual eps, a gradient that is zero but for rounding (of a key's bias) would move its parameter as far as
any other does, either way."""
PIPELINE = rj.Parallelism(pipeline=rj.Pipeline(num_stages=2))
GATHERED = rj.Parallelism(pipeline=rj.Pipeline(num_stages=2, gather_result=True))


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


def list_paths(tree):
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def trace_units(decoder, optimizer):
    cut = cut_model(decoder.loss, decoder.variables, make_batch(), jax.random.key(0))
    abstract = jax.eval_shape(lambda: (decoder.variables, optimizer.init(decoder.variables)))
    return UnitStates(list_state_units(cut), optimizer, Variables(abstract[0], {}), abstract[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the trainer makes of the whole model, and of the model in blocks, with the metrics of each step."""
    found = {}
    for name, parallelism in (("whole", rj.Parallelism()), ("blocks", GATHERED)):
        reports = []
        folder = tmp_path_factory.mktemp(name)
        checkpoints = rj.Checkpoints(directory=folder, interval_steps=STEPS)
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
            np.testing.assert_allclose(a, b, atol=2e-5)
    assert isinstance(blocks.model, NnxDecoder)


@pytest.mark.parametrize(("saved", "resumed"), [("blocks", rj.Parallelism()), ("whole", GATHERED)])
def test_a_checkpoint_has_the_layout_of_the_whole_model(trained, saved, resumed):
    result, _, folder = trained[saved]
    again = make_trainer(
        parallelism=resumed, checkpoints=rj.Checkpoints(directory=folder, interval_steps=STEPS)
    ).fit(STEPS)
    assert again.step == STEPS
    for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_result_of_a_pipeline_is_where_its_checkpoint_is_unless_it_is_gathered(trained):
    gathered, _, folder = trained["blocks"]
    checkpoints = rj.Checkpoints(directory=folder, interval_steps=STEPS)
    left = make_trainer(parallelism=PIPELINE, checkpoints=checkpoints).fit(STEPS)
    assert (left.step, left.checkpoint_directory) == (STEPS, folder)
    assert left.params_sha256 == gathered.params_sha256
    for name in ("variables", "params", "model", "ema_params", "ema_model"):
        with pytest.raises(CallerError, match=rf"of which no host has all.* step {STEPS} in {folder}"):
            getattr(left, name)


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(trained, tmp_path):
    shutil.copytree(trained["blocks"][2], tmp_path / "copy")
    checkpoints = rj.Checkpoints(directory=tmp_path / "copy", interval_steps=STEPS)
    resumed = make_trainer(parallelism=PIPELINE, checkpoints=checkpoints).fit(STEPS + 1)
    undisturbed = make_trainer(parallelism=PIPELINE).fit(STEPS + 1)
    assert resumed.params_sha256 == undisturbed.params_sha256


@pytest.mark.parametrize("kind", MAKERS)
def test_the_state_of_all_units_is_that_of_the_model(kind):
    decoder = MAKERS[kind]()
    state = OPTIMIZER.init(decoder.variables)
    units = trace_units(decoder, OPTIMIZER)
    parts = {
        number: units.init_unit(number, Variables(decoder.variables, {}))
        for number in range(len(units.units))
    }
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
    # What the units write of a checkpoint: each element of the model once.
    whole = dict(list_paths(joined))
    found = {path: np.zeros(np.shape(leaf), np.asarray(leaf).dtype) for path, leaf in whole.items()}
    written = {path: np.zeros(np.shape(leaf), int) for path, leaf in whole.items()}
    for number, part in parts.items():
        places = dict(units.list_places(number))
        for leaf in flatten_state(0, part).leaves:
            start = 0
            if (place := places.get(leaf.path)) is None:
                continue
            for box in place.list_boxes(leaf, (0,) * leaf.value.ndim, leaf.shape):
                index = box.index_within(whole_box(whole[place.name].shape))
                found[place.name][index] = np.ravel(leaf.value)[start : start + box.size].reshape(box.shape)
                written[place.name][index] += 1
                start += box.size
    for path, leaf in whole.items():
        if path.startswith((".variables", ".opt_state")):
            np.testing.assert_array_equal(found[path], leaf)
            assert (written[path] == 1).all(), path


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


def test_what_a_pipeline_cannot_do_is_refused_by_name():
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


def evaluate(parallelism, **options):
    """Return what each evaluation of a short training finds, and why training ended."""
    found = []
    data = {name: np.concatenate([make_batch(900 + one)[name] for one in range(6)]) for name in ("x", "y")}
    options = {"data": data, "interval_steps": 1, "microbatch_size": 4, **options}
    stopping = options.pop("early_stopping", None)

    def keep(report):
        if report.is_evaluation:
            found.append({name: value for name, value in report.metrics.items() if name.startswith("eval_")})

    result = rj.Trainer(
        model=lambda rngs: NnxDecoder(jnp.float32, rngs),
        optimizer=OPTIMIZER,
        loss_fn=lambda model, batch: cross_entropy(model(batch["x"]), batch),
        data=draw,
        batch_size=4,
        microbatch_size=2,
        numerics=rj.Numerics(ema_decay=0.5),
        parallelism=parallelism,
        evaluation=rj.Evaluation(**options),
        early_stopping=stopping,
        callbacks=[keep],
    ).fit(EVALUATED_STEPS)
    return found, result.stop_reason


def mean_logits(model, batch):
    logits = model(batch["x"])
    return jnp.mean(logits), {"largest": jnp.max(logits), "tokens": jnp.float32(batch["x"].size)}


@pytest.mark.parametrize(
    "options",
    full_but(
        [
            {},
            {"use_ema": True},
            {"loss_fn": mean_logits, "num_microbatches": 2},
            {"early_stopping": rj.EarlyStopping(patience=1, min_delta=10.0)},
        ],
        lambda options: "use_ema" in options or "loss_fn" in options,
    ),
    ids=["the training's loss", "averaged parameters", "a loss of its own", "early stopping"],
)
def test_an_evaluation_by_stages_is_that_of_the_whole_model(options):
    whole, why = evaluate(rj.Parallelism(), **options)
    blocks, why_blocks = evaluate(PIPELINE, **options)
    assert len(whole) == len(blocks) >= 2
    assert why == why_blocks
    for one, other in zip(whole, blocks, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-3), name


def test_an_evaluation_that_cannot_be_cut_as_the_training_is_refused_before_the_first_step():
    def first_layer(model, batch):
        x = model.table(batch["x"])
        return jnp.mean(model.table.attend(model.layers[0](x, make_mask(batch["x"]))))

    def in_reverse(model, batch):
        x = model.table(batch["x"])
        for layer in reversed(model.layers):
            x = layer(x, make_mask(batch["x"]))
        return jnp.mean(model.table.attend(x))

    def without_layers(model, batch):
        return jnp.mean(model.table(batch["x"]))

    for loss_fn, message in (
        (first_layer, "evaluation: found a loss that is cut into 3 blocks, expected 5"),
        (in_reverse, r"evaluation: found that block 1 of 5 uses layers/2/.*, expected only what"),
        (without_layers, "evaluation: loss: found no layers"),
    ):
        with pytest.raises(CallerError, match=message):
            evaluate(PIPELINE, loss_fn=loss_fn)


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
