"""The profile taken from Flax programs: what XLA measured, divided as the closed form of the same shape says.

They are compiled, several times: not for the unit tests.
"""

import dataclasses

import jax
import optax
import pytest
from decoder import LLAMA, Decoder, LoopedDecoder, closed_form, loss_of, tokens

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.memory import count_activations
from resilient_jax.planning.program_cost import ModelPart, TensorRole
from resilient_jax.planning.tensor_partition import find_axis_sizes
from resilient_jax.planning.transformer import count_parameters
from resilient_jax.program_cost.abstract_program import make_abstract_program
from resilient_jax.program_cost.program_analysis import analyze_program


def profile_program(model, again):
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
    "nnx": lambda again: lambda rngs: Decoder(LLAMA, rngs, rematerialised=again),
    "linen": lambda again: LoopedDecoder(LLAMA, rematerialised=again),
}


@pytest.fixture(scope="module")
def nnx_profile():
    return profile_program(MODELS["nnx"](False), MODELS["nnx"](True))


@pytest.fixture(scope="module")
def linen_profile():
    return profile_program(MODELS["linen"](False), MODELS["linen"](True))


@pytest.fixture(params=["nnx", "linen"])
def profile(request):
    return request.getfixturevalue(f"{request.param}_profile")


def work_of(profile, part):
    (work,) = (work for work in profile.work if work.part is part)
    return work


def test_products_are_divided_as_in_closed_form(profile):
    expected = closed_form(LLAMA)
    assert [work.part for work in profile.work] == [work.part for work in expected.parts]
    for found, wanted in zip(profile.work, expected.parts, strict=True):
        assert found.copies == wanted.copies
        assert dataclasses.astuple(found.forward_flops) == dataclasses.astuple(wanted.forward_flops)
        assert found.backward_flops.total == pytest.approx(wanted.backward_flops.total)


def test_everything_else_is_xlas(profile):
    assert profile.other_flops == pytest.approx(closed_form(LLAMA).other_flops, rel=0.03)


def test_devices_exchange_what_they_do_in_closed_form(profile):
    def sent(work):
        return sorted(
            (e.axis, e.kind, e.dim or "", e.message_bytes * e.forward, e.message_bytes * e.backward)
            for e in work.exchanges
        )

    for found, wanted in zip(profile.work, closed_form(LLAMA).parts, strict=True):
        assert sent(found) == sent(wanted)


def test_the_state_has_each_tensor_of_a_layer_once(profile):
    assert profile.parameters == count_parameters(LLAMA)
    query = next(t for t in profile.tensors if "query" in t.path and t.role is TensorRole.PARAMETER)
    assert (query.shape, query.names, query.copies) == ((64, 4, 16), ("embed", "heads", "head_dim"), 3)
    assert query.axes == (Axis.FSDP, Axis.TENSOR, None)


def test_the_optimizers_state_has_the_names_of_its_parameters(profile):
    assert profile.optimizer_bytes == 2 * profile.parameter_bytes + 4  # and the number of the step
    moments = [t for t in profile.tensors if "query" in t.path and t.role is TensorRole.OPTIMIZER]
    assert [(t.names, t.copies) for t in moments] == [(("embed", "heads", "head_dim"), 3)] * 2


def test_parameters_are_where_they_are_used(profile):
    parts = {t.path: t.parts for t in profile.tensors if t.role is TensorRole.PARAMETER and t.copies == 1}
    assert sorted(parts.values()) == [(ModelPart.EMBEDDING,), (ModelPart.HEAD,), (ModelPart.HEAD,)]


def test_axes_are_allowed_as_in_closed_form(profile):
    for axis in Axis:
        assert find_axis_sizes(profile, axis, 64) == find_axis_sizes(closed_form(LLAMA), axis, 64)


def test_a_layer_hands_on_one_vector_for_each_token(profile):
    assert work_of(profile, ModelPart.LAYER).input_bytes == 32 * 64 * 4


@pytest.mark.parametrize("again", [False, True], ids=["kept", "rematerialised"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_memory_is_that_of_the_compiled_gradient(request, kind, again):
    profile = request.getfixturevalue(f"{kind}_profile")
    program = make_abstract_program(MODELS[kind](again), loss_of, tokens(LLAMA, 6))
    gradient = jax.jit(jax.value_and_grad(program.loss_fn))
    memory = gradient.lower(program.params, program.others, program.batch).compile().memory_analysis()
    assert memory is not None
    kept = count_activations(profile, ReplicaAxes(), MicrobatchConfig(6, again))
    activations = kept.embedding + profile.layers * kept.layer + kept.head + kept.extra
    expected = profile.parameter_bytes + max(profile.parameter_bytes, profile.fixed_bytes + activations)
    found = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert expected == pytest.approx(found, rel=0.05)


def test_activations_in_closed_form_are_no_more_than_xla_needs_on_a_cpu(nnx_profile):
    expected = sum(work.copies * work.residual_bytes.total for work in closed_form(LLAMA).parts)
    found = sum(work.copies * work.kept_bytes.total for work in nnx_profile.work)
    assert 0.65 < expected / found < 1


def test_a_rematerialised_layer_computes_most_again(profile):
    layer = work_of(profile, ModelPart.LAYER)
    assert profile.can_rematerialise
    assert 0.7 < layer.recomputed_flops.total / layer.forward_flops.total <= 1


def test_a_rematerialised_layer_of_a_loop_keeps_what_went_into_it(linen_profile):
    layer = work_of(linen_profile, ModelPart.LAYER)
    assert layer.rematerialised_bytes.total == pytest.approx(layer.input_bytes, rel=0.4)
    assert layer.rematerialised_bytes.total < layer.kept_bytes.total / 10


def test_layers_one_by_one_keep_what_xla_keeps_which_on_a_cpu_is_nearly_all(nnx_profile):
    """On a CPU XLA undoes the rematerialisation outside of loops: the profile says what it needs there."""
    layer = work_of(nnx_profile, ModelPart.LAYER)
    assert layer.input_bytes < layer.rematerialised_bytes.total <= layer.kept_bytes.total
