"""The trainer with a model that is cut into blocks, on a host with several devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName
from resilient_jax.topology import NumberFormat, Peak
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.plan_topologies import cluster
from tests.support.small_decoders import NnxDecoder, cross_entropy, make_scanned

STEPS, ROWS = 2, 8
TENSOR = rj.LogicalAxisRules(names_by_path=[("*/mlp/kernel", ("embed", "mlp")), ("*/mlp/bias", ("mlp",))])
TENSOR_OF_LAYERS = rj.LogicalAxisRules(names_by_path=[("*Dense_1/kernel", ("layers", "embed", "mlp"))])
AXES = {
    "fsdp alone, by default": ({}, None),
    "data, tensor, and fsdp with what they leave": ({"data": 2, "tensor": 2}, TENSOR),
}


def draw(step, index):
    found = np.random.default_rng((step, index)).integers(0, 24, (2, ROWS, 8), np.int32)
    return {"x": found[0], "y": found[1]}


def make_trainer(parallelism, reports=None, **options):
    return rj.Trainer(
        model=lambda rngs: NnxDecoder(jnp.float32, rngs),
        optimizer=optax.adamw(
            1e-2, eps=1e-3
        ),  # gradients of zero are rounding errors, and would be scaled up
        loss_fn=lambda model, batch: cross_entropy(model(batch["x"]), batch),
        data=draw,
        batch_size=2 * ROWS,
        microbatch_size=ROWS,
        numerics=rj.Numerics(clip_norm=0.5),
        parallelism=parallelism,
        callbacks=[] if reports is None else [reports.append],
        **options,
    )


def pipeline(axis_sizes, rules=None):
    pipeline = rj.Pipeline(num_stages=2, axis_sizes=axis_sizes, logical_axis_rules=rules, gather_result=True)
    return rj.Parallelism(pipeline=pipeline)


def list_specs(report):
    """Return the specs of the weights and of the moments of Adam, by the name of the weight."""
    found = {}
    for unit in report.state.units:
        for name, weight in unit.weights.items():
            found[name] = weight.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(unit.opt_state):
            text = jax.tree_util.keystr(path, simple=True, separator="/")
            for name, weight in unit.weights.items():
                if text.endswith(name):
                    assert leaf.sharding.is_equivalent_to(weight.sharding, leaf.ndim), text
    return found


@pytest.fixture(scope="module")
def whole(eight_devices):  # noqa: F811 - that fixture
    """What the trainer makes of the model without blocks."""
    return make_trainer(rj.Parallelism()).fit(STEPS)


@pytest.mark.full  # and jobs/test_pipelined_devices.py
@pytest.mark.parametrize("axes", AXES)
def test_blocks_on_several_devices_train_as_the_whole_model_does(axes, whole, tmp_path):
    sizes, rules = AXES[axes]
    reports = []
    checkpoints = rj.Checkpoints(directory=tmp_path, interval_steps=STEPS)
    evaluation = rj.Evaluation(data={"x": draw(9, 9)["x"], "y": draw(9, 9)["y"]}, interval_steps=STEPS)
    result = make_trainer(
        pipeline(sizes, rules), reports, checkpoints=checkpoints, evaluation=evaluation
    ).fit(STEPS)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert np.isfinite(result.metrics["eval_loss"])
    specs = list_specs(reports[0])
    kernel = next(spec for name, spec in specs.items() if name.endswith("mlp/kernel"))
    assert kernel == (P("fsdp", "tensor") if rules else P("fsdp"))
    # A checkpoint has the layout of the whole model: another number of devices resumes from it.
    again = make_trainer(rj.Parallelism(), checkpoints=checkpoints).fit(STEPS)
    for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    resumed = make_trainer(pipeline(sizes, rules), checkpoints=checkpoints).fit(STEPS + 1)
    undisturbed = make_trainer(pipeline(sizes, rules)).fit(STEPS + 1)
    assert resumed.params_sha256 == undisturbed.params_sha256


def test_a_scan_over_layers_is_sharded_along_the_dims_of_a_layer(eight_devices):  # noqa: F811 - that fixture
    decoder, reports = make_scanned(), []
    rj.Trainer(
        model=lambda key: decoder.variables,
        optimizer=optax.adamw(1e-2),
        loss_fn=lambda variables, batch, key: decoder.loss(variables, batch, key),
        data=lambda step, index: {name: rows[:2] for name, rows in draw(step, index).items()},
        batch_size=2,
        microbatch_size=2,
        parallelism=pipeline({"fsdp": 2, "data": 1, "tensor": 4}, TENSOR_OF_LAYERS),
        callbacks=[reports.append],
    ).fit(1)
    specs = list_specs(reports[0])
    kernels = {name: spec for name, spec in specs.items() if "Dense_1/kernel" in name}
    assert len(kernels) == 3
    assert set(kernels.values()) == {P("fsdp", "tensor")}


def test_a_planner_chooses_the_axes_of_a_hosts_devices(eight_devices):  # noqa: F811 - that fixture
    (host,), reports = cluster([1.0], devices=8).hosts, []
    peaks = (Peak(number_format=NumberFormat.FP32, flops_per_s=1e10),)
    host = dataclasses.replace(
        host,
        name=HostName("localhost"),
        accelerator=dataclasses.replace(host.accelerator, peaks=peaks),
    )
    topology = dataclasses.replace(cluster([1.0], devices=8), hosts=(host,))
    planner = rj.Planner(topology=topology, axis_sizes={"tensor": 2}, logical_axis_rules=TENSOR)
    make_trainer(pipeline({}), reports, planner=planner).fit(1)
    specs = list_specs(reports[0])
    assert next(spec for name, spec in specs.items() if name.endswith("mlp/kernel")) == P("fsdp", "tensor")
    with pytest.raises(CallerError, match="the planner chooses the axes of the devices of a host"):
        make_trainer(pipeline({"tensor": 2}), planner=planner)


def test_axes_that_do_not_fit_are_refused_by_name(eight_devices):  # noqa: F811 - that fixture
    with pytest.raises(CallerError, match=r"axis_sizes=\{'tensor': 3\} and 8 devices on"):
        make_trainer(pipeline({"tensor": 3})).fit(1)
    with pytest.raises(CallerError, match="no weight that tensor 2 shards"):
        make_trainer(pipeline({"tensor": 2})).fit(1)
    with pytest.raises(
        CallerError, match=r"found axis_sizes=\{'replica': 2\}, expected positive sizes of data, fsdp"
    ):
        rj.Pipeline(num_stages=2, axis_sizes={"replica": 2})
    with pytest.raises(CallerError, match=r"microbatch_size: found 4 on host .*, expected a multiple of 8"):
        rj.Trainer(
            model=lambda rngs: NnxDecoder(jnp.float32, rngs),
            optimizer=optax.adamw(1e-2),
            loss_fn=lambda model, batch: cross_entropy(model(batch["x"]), batch),
            data=lambda step, index: {name: rows[:4] for name, rows in draw(step, index).items()},
            batch_size=8,
            microbatch_size=4,
            parallelism=pipeline({}),
        ).fit(1)
