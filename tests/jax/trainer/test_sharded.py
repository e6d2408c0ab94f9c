"""The trainer with a sharded state, on the eight devices of one host."""

import functools
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.checkpoint.part_plan import HostCopy
from resilient_jax.checkpoint.stored_tree import view_boxes
from resilient_jax.errors import CallerError
from resilient_jax.step import reduction
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.full_only import full_but
from tests.support.whole_checkpoints import plan_whole

WIDTH, STEPS = 48, 3


@pytest.fixture(autouse=True)
def forget(eight_devices):  # noqa: F811 - that fixture
    yield
    reduction.clear_caches()


def make_params(key):
    draw = np.random.default_rng(0).normal
    return {
        name: jnp.asarray(draw(size=shape) * 0.1, jnp.float32)
        for name, shape in (("in", (3, WIDTH)), ("middle", (WIDTH, WIDTH)), ("out", (WIDTH, 1)))
    }


def loss(params, batch):
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["in"]) @ params["middle"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def batch(step, index):
    x = np.random.default_rng((step, index)).normal(size=(8, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def make_trainer(state, optimizer=None, **changes):
    defaults = {
        "model": make_params,
        "optimizer": optimizer or optax.adamw(0.01),
        "loss_fn": loss,
        "data": batch,
        "batch_size": 24,
        "microbatch_size": 8,
        "numerics": rj.Numerics(clip_norm=0.1),
        "parallelism": rj.Parallelism(state=state),
    }
    return rj.Trainer(**{**defaults, **changes})


OPTIMIZERS = {
    "adamw": optax.adamw(0.01),
    "noise, which keeps a key": optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.01, momentum=0.9)),
    "lamb": optax.lamb(0.01),
}


@functools.cache
def fit_replicated(name):
    """Return the result with a replicated state."""
    return make_trainer("replicated", OPTIMIZERS[name]).fit(STEPS)


@pytest.mark.parametrize("name", ["adamw", "noise, which keeps a key"])
def test_a_sharded_state_ends_with_the_bits_of_a_replicated_one(name, caplog):
    sharded = make_trainer("sharded", OPTIMIZERS[name]).fit(STEPS)
    assert sharded.params_sha256 == fit_replicated(name).params_sha256
    assert sharded.metrics == fit_replicated(name).metrics
    assert "communicates between devices" not in caplog.text


def test_an_optimizer_that_reduces_over_a_leaf_is_correct_within_rounding_and_warns(caplog):
    sharded = make_trainer("sharded", OPTIMIZERS["lamb"]).fit(STEPS)
    for name, expected in fit_replicated("lamb").params.items():
        # Another order of addition in norms of some thousand elements: a few roundings of float32.
        np.testing.assert_allclose(sharded.params[name], expected, rtol=1e-4, atol=1e-6)
    assert "communicates between devices (all-gather)" in caplog.text


def test_the_steps_after_the_first_compile_nothing(caplog):
    compiled = []
    count = lambda report: compiled.append(caplog.text.count("Finished XLA compilation"))  # noqa: E731
    with jax.log_compiles():
        make_trainer("sharded", callbacks=[count]).fit(STEPS)
    assert compiled[0] > 0
    assert set(compiled) == {compiled[0]}


@pytest.mark.parametrize(
    ("first", "second"),
    full_but([("replicated", "sharded"), ("sharded", "replicated")], lambda case: case[0] == "sharded"),
)
def test_a_checkpoint_of_one_state_sharding_is_resumed_with_the_other(first, second, tmp_path, monkeypatch):
    monkeypatch.setitem(
        globals(), "WIDTH", 49
    )  # no number of devices divides it: shards are ranges of elements
    kept = rj.Checkpoints(directory=tmp_path, interval_steps=2)
    make_trainer(first, checkpoints=kept).fit(2)
    steps = []
    resumed = make_trainer(
        second, checkpoints=kept, callbacks=[lambda report: steps.append(report.step)]
    ).fit(4)
    assert steps == [3, 4]
    assert resumed.params_sha256 == make_trainer("replicated").fit(4).params_sha256


def test_an_unknown_kind_of_state_sharding_is_refused():
    with pytest.raises(CallerError, match="found state='complete', expected one of replicated, sharded"):
        rj.Parallelism(state="complete")


def test_all_shards_of_a_state_on_one_host_are_copied_for_a_checkpoint():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs = {"rows": ("a",), "both": ("b", "a"), "columns": (None, "b"), "copies": ()}
    state = {
        name: jax.device_put(whole, jax.NamedSharding(mesh, jax.P(*spec))) for name, spec in specs.items()
    }
    copy = HostCopy()
    part = plan_whole({**state, "number": jnp.int32(7)})
    with mmap.mmap(copy.copy(part), 0) as memory:
        for leaf in part.leaves:
            expected = 7 if leaf.path[0].name == "number" else whole
            assert np.array_equal(view_boxes(leaf, memory)[0].copy(), expected), leaf.path
    copy.free()
