"""The cost that XLA measures of a program is split as in the closed form of the same shape."""

import doctest

import flax.linen as nn
import jax
import jax.numpy as jnp
import msgspec
import pytest
from flax import nnx

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import ModelPart, TensorRole
from resilient_jax.planning.tensor_partition import find_axis_sizes
from resilient_jax.program_analysis import program_analysis
from resilient_jax.program_analysis.abstract_program import make_abstract_program
from resilient_jax.program_analysis.program_analysis import analyze_program
from resilient_jax.program_analysis.xla_cost import count_flops
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from tests.support.decoder import EXAMPLES, LLAMA, Decoder, closed_form, loss_of, tokens

GPT = msgspec.structs.replace(
    LLAMA, kv_heads=4, gated=False, norm="layer", biases="all", positions="table", tied_embedding=True
)
QWEN = msgspec.structs.replace(LLAMA, layers=2, width=96, head_dim=32, sequence_tokens=64, biases="qkv")
SHAPES = {"llama": LLAMA, "gpt": GPT, "qwen": QWEN}


@pytest.mark.parametrize("name", SHAPES)
def test_flops_in_closed_form_equal_those_that_xla_counts(name):
    shape = SHAPES[name]
    program = make_abstract_program(lambda rngs: Decoder(shape, rngs), loss_of, tokens(shape))
    arguments = (program.params, program.others, program.batch)
    expected = closed_form(shape)
    forward = expected.forward_flops.total + sum(w.copies * w.forward_other_flops for w in expected.parts)
    gradient = forward + expected.backward_flops.total
    gradient += sum(work.copies * work.backward_other_flops for work in expected.parts)
    assert EXAMPLES * forward == pytest.approx(count_flops(program.loss_fn, *arguments), rel=0.001)
    found = count_flops(jax.value_and_grad(program.loss_fn), *arguments)
    assert EXAMPLES * gradient == pytest.approx(found, rel=0.001)


def test_flops_in_closed_form_equal_those_that_xla_counts_after_optimization():
    program = make_abstract_program(lambda rngs: Decoder(QWEN, rngs), loss_of, tokens(QWEN))
    gradient = jax.jit(jax.value_and_grad(program.loss_fn))
    analysis = gradient.lower(program.params, program.others, program.batch).compile().cost_analysis()
    assert analysis is not None
    expected = closed_form(QWEN)
    total = expected.forward_flops.total + expected.backward_flops.total + expected.other_flops
    assert EXAMPLES * total == pytest.approx(analysis["flops"], rel=0.02)


def test_a_program_without_a_rematerialized_model_cannot_use_remat():
    profile = analyze_program(plain, plain_loss, PLAIN_BATCH, name="plain", logical_axis_rules=PLAIN_NAMING)
    assert not profile.can_remat
    (work,) = profile.parts
    assert work.part is ModelPart.LAYER
    assert work.remat_residual_bytes == work.residual_bytes


def plain(key):
    return {"up": jax.random.normal(key, (16, 24)), "down": jnp.zeros((24, 16))}


def plain_loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2), {"aux": 1}


PLAIN_BATCH = jax.ShapeDtypeStruct((8, 16), jnp.float32)
PLAIN_NAMING = LogicalAxisRules(names_by_path=[("up", ("embed", "mlp")), ("down", ("mlp", "embed"))])


def test_a_plain_function_is_analyzed_by_rules_on_paths():
    profile = analyze_program(plain, plain_loss, PLAIN_BATCH, name="plain", logical_axis_rules=PLAIN_NAMING)
    assert profile.forward_flops.tensor == profile.forward_flops.total == 2 * 2 * 16 * 24
    assert find_axis_sizes(profile, Axis.TENSOR, 8) == (1, 2, 3, 4, 6, 8)
    assert find_axis_sizes(profile, Axis.PIPELINE, 8) == find_axis_sizes(profile, Axis.SEQUENCE, 8) == (1,)


def test_each_device_of_a_tensor_group_reads_whole_inputs_and_writes_whole_partial_sums():
    width, hidden = 64, 256
    cost = analyze_program(
        lambda key: {"up": jnp.zeros((width, hidden)), "down": jnp.zeros((hidden, width))},
        lambda params, x: (jax.nn.relu(x @ params["up"]) @ params["down"]).sum(),
        jax.ShapeDtypeStruct((8, width), jnp.float32),
        name="two products",
        logical_axis_rules=LogicalAxisRules(
            names_by_path=[("up", ("embed", "mlp")), ("down", ("mlp", "embed"))]
        ),
    )
    (part,) = cost.parts
    # The first product reads its input, the second writes its result, the sum reads that: 3 vectors that no axis
    # divides; the products write and read the hidden one, which tensor divides. The sum itself is one number.
    share = part.forward_bytes.replicated / part.forward_bytes.total
    assert share == pytest.approx((3 * width + 1 / 8) / (3 * width + 1 / 8 + 2 * hidden), rel=1e-3)


def test_only_parameters_have_a_gradient():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))

    profile = analyze_program(Net(), lambda model, x: model(x).mean(), PLAIN_BATCH, name="norm")
    assert sorted(t.path for t in profile.tensors if t.role is TensorRole.OTHER) == [
        "batch_stats/BatchNorm_0/mean",
        "batch_stats/BatchNorm_0/var",
    ]


REFUSED = {
    "an instance": (lambda: {"model": {"w": 1}}, "model: found a dict, expected a function"),
    "no scalar": (
        lambda: {"loss": lambda params, x: x @ params["up"]},
        "loss_fn: found a result .*expected a scalar",
    ),
    "no examples": (
        lambda: {
            "batch": {"x": jnp.zeros(()), "y": jnp.zeros((2,))},
            "loss": lambda params, x: jnp.zeros(()),
        },
        "batch: found the shapes .*expected the same number of examples",
    ),
    "no parameters": (lambda: {"model": lambda key: {}}, "model: found no parameters"),
    "a parameter without gradient": (
        lambda: {"model": lambda key: {"up": jnp.zeros((16, 24)), "count": jnp.zeros(3, jnp.int32)}},
        "model: found the parameter count of int32, expected a dtype that has a gradient",
    ),
    "a loss without gradient": (
        lambda: {"loss": lambda params, x: (x @ params["up"]).sum().astype(jnp.int32)},
        "loss_fn: found a scalar of int32, expected a floating-point type",
    ),
    "another model with remat": (
        lambda: {
            "remat_model": lambda key: {"up": jnp.zeros((16, 24))},
            "loss": lambda p, x: (x @ p["up"]).sum(),
        },
        r"remat_model: found other parameters than the model's, first down of shape \(24, 16\)",
    ),
    "a name that no axis cuts": (
        lambda: {"logical_axis_rules": LogicalAxisRules(names_by_path=[("up", ("embed", "hidden"))])},
        "up: found the logical name 'hidden'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_loss_or_batch_that_does_not_fit_is_refused(case):
    changed, said = REFUSED[case]
    given = {"model": plain, "loss": plain_loss, "batch": PLAIN_BATCH, "name": "plain", **changed()}
    with pytest.raises(CallerError, match=said):
        analyze_program(given.pop("model"), given.pop("loss"), given.pop("batch"), **given)


def test_an_nnx_module_that_is_already_built_is_refused():
    with pytest.raises(CallerError, match="model: found a Linear"):
        analyze_program(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), plain_loss, PLAIN_BATCH, name="made")


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(program_analysis)
    assert result.attempted > 0
    assert result.failed == 0
