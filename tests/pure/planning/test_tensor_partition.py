"""How axes partition tensors, and which sizes a program allows."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis, parse_axis_sizes
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.program_cost import (
    DivisibilityRule,
    ModelPart,
    ProgramCost,
    StateTensor,
    TensorRole,
)
from resilient_jax.planning.tensor_partition import (
    count_shards,
    find_axis_sizes,
    find_violated_rules,
    partition_tensor,
    require_partitionable,
)
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.planning.transformer_cost import analyze_transformer

SHAPE = TransformerShape(
    layers=6,
    width=48,
    heads=6,
    kv_heads=2,
    head_dim=8,
    feed_forward=96,
    vocabulary_tokens=101,
    sequence_tokens=40,
)
PROFILE = analyze_transformer(SHAPE, name="small")


def make_tensor(shape, axes, units=None):
    return StateTensor(
        path="kernel",
        role=TensorRole.PARAMETER,
        parts=(ModelPart.LAYER,),
        shape=tuple(shape),
        logical_names=(None,) * len(shape),
        axes=tuple(axes),
        units=tuple(units or shape),
        dtype_bytes=4,
    )


tensors = st.lists(
    st.tuples(st.integers(1, 48), st.sampled_from([None, Axis.FSDP, Axis.TENSOR, Axis.EXPERT])),
    max_size=4,
    unique_by=lambda dim: dim[1] or object(),
).map(lambda dims: make_tensor([size for size, _ in dims], [axis for _, axis in dims]))
sizes = st.fixed_dictionaries({axis: st.integers(1, 6) for axis in (Axis.FSDP, Axis.TENSOR, Axis.EXPERT)})


@given(tensors, sizes)
def test_shards_are_equal_and_no_axis_shards_two_dims(tensor, axes):
    found = partition_tensor(tensor, axes)
    for size, cutting in zip(tensor.shape, found, strict=True):
        assert size % math.prod(axes[axis] for axis in cutting) == 0
    used = [axis for cutting in found for axis in cutting]
    assert len(used) == len(set(used))
    assert all(axes[axis] > 1 for axis in used)


@given(tensors, sizes)
def test_fsdp_shards_every_tensor_with_a_dim_that_it_divides(tensor, axes):
    without = partition_tensor(tensor, {**axes, Axis.FSDP: 1})
    left = [size // math.prod(axes[a] for a in c) for size, c in zip(tensor.shape, without, strict=True)]
    can = axes[Axis.FSDP] > 1 and any(size % axes[Axis.FSDP] == 0 for size in left)
    more = axes[Axis.FSDP] if can else 1
    assert count_shards(tensor, axes) == more * count_shards(tensor, {**axes, Axis.FSDP: 1})


def test_a_dim_is_divided_between_its_heads_only():
    fused = make_tensor((48, 64), (Axis.FSDP, Axis.TENSOR), (48, 4))
    assert partition_tensor(fused, {Axis.TENSOR: 4}) == ((), (Axis.TENSOR,))
    assert partition_tensor(fused, {Axis.TENSOR: 8}) == ((), ())


def test_the_sizes_that_a_transformer_allows():
    assert find_axis_sizes(PROFILE, Axis.TENSOR, 64) == (
        1,
        2,
        3,
        6,
    )  # heads 6, feed-forward 96; keys and values are replicated
    assert find_axis_sizes(PROFILE, Axis.SEQUENCE, 16) == (1, 2, 4, 5, 8, 10)
    assert find_axis_sizes(PROFILE, Axis.EXPERT, 64) == (1,)
    assert find_axis_sizes(PROFILE, Axis.PIPELINE, 64) == (1, 2, 3, 4, 5, 6)
    assert find_axis_sizes(PROFILE, Axis.FSDP, 3) == (1, 2, 3)


@given(st.sampled_from(Axis), st.integers(1, 64))
def test_a_size_is_allowed_or_has_a_reason(axis, size):
    assert (size in find_axis_sizes(PROFILE, axis, 64)) == (
        not find_violated_rules(PROFILE.divisibility_rules, axis, size)
    )


def test_the_reason_names_the_dim_and_its_size():
    assert [
        (d.logical_name, d.dim_size) for d in find_violated_rules(PROFILE.divisibility_rules, Axis.TENSOR, 4)
    ] == [("heads", 6)]
    assert [
        (d.logical_name, d.dim_size)
        for d in find_violated_rules(PROFILE.divisibility_rules, Axis.PIPELINE, 7)
    ] == [("layers", 6)]


def test_an_axis_without_a_dim_in_the_program_is_forbidden():
    found = find_violated_rules((), Axis.SEQUENCE, 2)
    assert [(d.logical_name, d.dim_size) for d in found] == [("tokens", 1)]


def test_an_axis_whose_rules_are_all_optional_must_satisfy_one():
    only = dataclasses.replace(
        PROFILE,
        divisibility_rules=(
            DivisibilityRule(axis=Axis.TENSOR, logical_name="vocab", dim_size=10, is_required=False),
        ),
    )
    assert find_axis_sizes(only, Axis.TENSOR, 64) == (1, 2, 5, 10)


def indivisible() -> ProgramCost:
    tensor = make_tensor((127, 131), (Axis.FSDP, Axis.TENSOR))
    divisor = DivisibilityRule(axis=Axis.TENSOR, logical_name="mlp", dim_size=131, is_required=True)
    return dataclasses.replace(PROFILE, name="primes", tensors=(tensor,), divisibility_rules=(divisor,))


def test_a_model_that_no_axis_can_shard_is_refused_with_its_dims():
    with pytest.raises(
        CallerError, match=r"primes: .*nothing from 2 to 8 \(mlp = 131; sizes of parameters: 127, 131\)"
    ):
        require_partitionable(indivisible(), 8)


def test_a_model_that_some_axis_can_shard_is_not_refused():
    require_partitionable(PROFILE, 8)
    require_partitionable(indivisible(), 127)


def test_of_two_dims_with_one_name_one_is_sharded():
    square = make_tensor((12, 12), (Axis.TENSOR, Axis.TENSOR))
    assert partition_tensor(square, {Axis.TENSOR: 4}) == ((Axis.TENSOR,), ())
    assert count_shards(square, {Axis.TENSOR: 4}) == 4
    odd = make_tensor((9, 12), (Axis.TENSOR, Axis.TENSOR))
    assert partition_tensor(odd, {Axis.TENSOR: 4}) == ((), (Axis.TENSOR,))


def test_axes_may_be_given_by_their_names():
    assert parse_axis_sizes({"tensor": 2, Axis.FSDP: 4}) == {Axis.TENSOR: 2, Axis.FSDP: 4}
    with pytest.raises(PlanError, match="axes: found 'tensors', expected names of replica, fsdp, tensor"):
        parse_axis_sizes({"tensors": 2})
