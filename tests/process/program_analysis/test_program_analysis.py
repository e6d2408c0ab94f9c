"""The cost of Flax programs: what XLA measures, split as the closed form of the same shape says.

Every program is compiled several times, which is too slow for the unit tests.
"""

import dataclasses

import jax
import optax
import pytest

from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.memory import count_activations
from resilient_jax.planning.program_cost import ModelPart, TensorRole
from resilient_jax.planning.tensor_partition import find_axis_sizes
from resilient_jax.planning.transformer import count_parameters
from resilient_jax.program_analysis.abstract_program import make_abstract_program
from resilient_jax.program_analysis.program_analysis import analyze_program
from tests.support.decoder import LLAMA, Decoder, LoopedDecoder, closed_form, loss_of, tokens
from tests.support.full_only import full_but


def measure_program(model, again):
    return analyze_program(
        model,
        loss_of,
        tokens(LLAMA),
        name="small",
        optimizer=optax.adamw(1e-3),
        sequence_tokens=LLAMA.sequence_tokens,
        remat_model=again,
    )


MODELS = {
    "nnx": lambda again: lambda rngs: Decoder(LLAMA, rngs, remat=again),
    "linen": lambda again: LoopedDecoder(LLAMA, remat=again),
}


@pytest.fixture(scope="module")
def nnx_cost():
    return measure_program(MODELS["nnx"](False), MODELS["nnx"](True))


@pytest.fixture(scope="module")
def linen_cost():
    return measure_program(MODELS["linen"](False), MODELS["linen"](True))


@pytest.fixture(params=["nnx", "linen"])
def cost(request):
    return request.getfixturevalue(f"{request.param}_cost")


def get_part(cost, part):
    (found,) = (found for found in cost.parts if found.part is part)
    return found


def test_matrix_products_are_split_as_in_closed_form(cost):
    expected = closed_form(LLAMA)
    assert [part.part for part in cost.parts] == [part.part for part in expected.parts]
    for found, wanted in zip(cost.parts, expected.parts, strict=True):
        assert found.copies == wanted.copies
        assert dataclasses.astuple(found.forward_flops) == dataclasses.astuple(wanted.forward_flops)
        assert found.backward_flops.total == pytest.approx(wanted.backward_flops.total)


def test_other_flops_are_those_of_xla(cost):
    assert cost.other_flops == pytest.approx(closed_form(LLAMA).other_flops, rel=0.03)


def test_collectives_are_those_of_the_closed_form(cost):
    def list_collectives(part):
        return sorted(
            (
                e.axis,
                e.kind,
                e.logical_name or "",
                e.message_bytes * e.forward_count,
                e.message_bytes * e.backward_count,
            )
            for e in part.collectives
        )

    for found, wanted in zip(cost.parts, closed_form(LLAMA).parts, strict=True):
        assert list_collectives(found) == list_collectives(wanted)


def test_the_state_has_each_tensor_of_a_layer_once(cost):
    assert cost.parameter_count == count_parameters(LLAMA)
    query = next(t for t in cost.tensors if "query" in t.path and t.role is TensorRole.PARAMETER)
    assert (query.shape, query.logical_names, query.copies) == (
        (64, 4, 16),
        ("embed", "heads", "head_dim"),
        3,
    )
    assert query.axes == (Axis.FSDP, Axis.TENSOR, None)


def test_optimizer_state_has_the_names_of_its_parameters(cost):
    assert cost.optimizer_bytes == 2 * cost.parameter_bytes + 4  # and the number of the step
    moments = [t for t in cost.tensors if "query" in t.path and t.role is TensorRole.OPTIMIZER]
    assert [(t.logical_names, t.copies) for t in moments] == [(("embed", "heads", "head_dim"), 3)] * 2


def test_parameters_are_where_they_are_used(cost):
    parts = {t.path: t.parts for t in cost.tensors if t.role is TensorRole.PARAMETER and t.copies == 1}
    assert sorted(parts.values()) == [(ModelPart.EMBEDDING,), (ModelPart.HEAD,), (ModelPart.HEAD,)]


def test_axes_are_allowed_as_in_closed_form(cost):
    for axis in Axis:
        assert find_axis_sizes(cost, axis, 64) == find_axis_sizes(closed_form(LLAMA), axis, 64)


def test_the_input_of_a_layer_is_one_vector_per_token(cost):
    assert get_part(cost, ModelPart.LAYER).input_bytes == 32 * 64 * 4


@pytest.mark.parametrize("again", [False, True], ids=["kept", "rematerialized"])
@pytest.mark.parametrize("kind", full_but(["nnx", "linen"], lambda kind: kind == "linen"))
def test_memory_is_that_of_the_compiled_gradient(request, kind, again):
    cost = request.getfixturevalue(f"{kind}_cost")
    program = make_abstract_program(MODELS[kind](again), loss_of, tokens(LLAMA, 6))
    gradient = jax.jit(jax.value_and_grad(program.loss_fn))
    memory = gradient.lower(program.params, program.others, program.batch).compile().memory_analysis()
    assert memory is not None
    kept = count_activations(cost, ReplicaAxes(), MicrobatchConfig(6, again))
    activations = kept.embedding + cost.layers * kept.layer + kept.head + kept.extra
    expected = cost.parameter_bytes + max(cost.parameter_bytes, cost.fixed_bytes + activations)
    found = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert expected == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "rematerialized"])
def test_memory_of_stages_is_what_their_programs_keep(linen_cost, again):
    program = make_abstract_program(MODELS["linen"](False), loss_of, tokens(LLAMA, 6))

    def loss(variables, batch, _):
        params, others = variables
        return program.loss_fn(params, others, batch)

    variables = program.params, program.others
    cut = cut_model(loss, variables, program.batch, jax.eval_shape(lambda: jax.random.key(0)), remat=again)
    stage = count_activations(linen_cost, ReplicaAxes(pipeline=2), MicrobatchConfig(6, again))
    found = [
        sum(kept.size * kept.dtype.itemsize for kept in cut.kinds[block.kind].kind.derivative.residuals)
        for block in cut.blocks
    ]
    if again:
        assert found[1:-1] == [stage.layer] * linen_cost.layers
    else:
        assert found == [stage.embedding, *[stage.layer] * linen_cost.layers, stage.head]


def test_activations_in_closed_form_are_no_more_than_xla_needs_on_a_cpu(nnx_cost):
    expected = sum(part.copies * part.residual_bytes.total for part in closed_form(LLAMA).parts)
    found = sum(part.copies * part.residual_bytes.total for part in nnx_cost.parts)
    assert 0.65 < expected / found < 1


def test_a_rematerialized_layer_recomputes_most_of_its_flops(cost):
    layer = get_part(cost, ModelPart.LAYER)
    assert cost.can_remat
    assert 0.7 < layer.remat_flops.total / layer.forward_flops.total <= 1


def test_a_rematerialized_layer_of_a_loop_keeps_its_input(linen_cost):
    layer = get_part(linen_cost, ModelPart.LAYER)
    assert layer.remat_residual_bytes.total == pytest.approx(layer.input_bytes, rel=0.4)
    assert layer.remat_residual_bytes.total < layer.residual_bytes.total / 10


def test_unrolled_layers_keep_what_xla_keeps_which_on_a_cpu_is_nearly_all(nnx_cost):
    """On a CPU XLA undoes the rematerialization outside of loops: the cost has what it needs there."""
    layer = get_part(nnx_cost, ModelPart.LAYER)
    assert layer.input_bytes < layer.remat_residual_bytes.total <= layer.residual_bytes.total
