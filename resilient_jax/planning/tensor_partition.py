"""How a plan's axes partition a tensor, and which sizes of an axis a program allows.

One rule for memory, traffic and the program's shardings: what is estimated is what runs. JAX divides a dim only into
equal parts, so a dim that an axis does not divide is replicated along it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import DivisibilityRule, ProgramCost, StateTensor

TensorPartition = tuple[tuple[Axis, ...], ...]
"""The axes that shard each dim, as in a PartitionSpec."""


def partition_tensor(tensor: StateTensor, sizes: Mapping[Axis, int]) -> TensorPartition:
    """Return the axes that shard each dim of a tensor of the state.

    First each dim by its own axis, where that divides its units. Then FSDP shards one dim: one that prefers FSDP, else
    the largest, and of equal ones the first, where it divides what is left.

    Args:
        sizes: sizes of the plan's axes; a missing axis has size 1.

    >>> from resilient_jax.planning.program_cost import ModelPart, TensorRole
    >>> kernel = StateTensor(path="up", role=TensorRole.PARAMETER, parts=(ModelPart.LAYER,), shape=(8, 12),
    ...                      logical_names=("embed", "mlp"), axes=(Axis.FSDP, Axis.TENSOR), units=(8, 12),
    ...                      dtype_bytes=4)
    >>> [[str(axis) for axis in dim] for dim in partition_tensor(kernel, {Axis.FSDP: 4, Axis.TENSOR: 3})]
    [['fsdp'], ['tensor']]
    >>> [[str(axis) for axis in dim] for dim in partition_tensor(kernel, {Axis.FSDP: 3, Axis.TENSOR: 2})]
    [[], ['tensor', 'fsdp']]
    """
    own: list[tuple[Axis, ...]] = []
    for dim in range(len(tensor.shape)):
        axis = _own_axis(tensor, dim, sizes)
        # An axis shards one dim of an array, not two.
        own.append(() if axis in own else axis)
    fsdp = sizes.get(Axis.FSDP, 1)
    if fsdp > 1:
        # left_d = n_d / (product of the axes that shard dim d); FSDP of size f shards a dim with left_d mod f = 0.
        left = [size // math.prod(sizes[axis] for axis in own[dim]) for dim, size in enumerate(tensor.shape)]
        dims = sorted(range(len(left)), key=lambda dim: (tensor.axes[dim] is not Axis.FSDP, -left[dim]))
        chosen = next((dim for dim in dims if left[dim] % fsdp == 0), None)
        if chosen is not None:
            own[chosen] = (*own[chosen], Axis.FSDP)
    return tuple(own)


def _own_axis(tensor: StateTensor, dim: int, sizes: Mapping[Axis, int]) -> tuple[Axis, ...]:
    axis = tensor.axes[dim]
    if axis is None or axis is Axis.FSDP or sizes.get(axis, 1) == 1 or tensor.units[dim] % sizes[axis]:
        return ()
    return (axis,)


def count_shards(tensor: StateTensor, sizes: Mapping[Axis, int]) -> int:
    """Return the number of equal shards of a tensor; a device has one of them (of each layer on its stage)."""
    # s = product of the sizes of all axes of all dims; a device has n / s elements.
    return math.prod(sizes[axis] for axes in partition_tensor(tensor, sizes) for axis in axes)


def is_divisible(rule: DivisibilityRule, size: int) -> bool:
    """Return whether an axis of this size can shard such a dim; a pipeline needs at least one layer for each stage."""
    return size <= rule.dim_size if rule.axis is Axis.PIPELINE else rule.dim_size % size == 0


def find_violated_rules(
    rules: Sequence[DivisibilityRule], axis: Axis, size: int
) -> tuple[DivisibilityRule, ...]:
    """Return the rules that forbid an axis of this size: required ones that it violates, or all if it violates all.

    A program without a dim for the axis forbids every size but 1, by a rule of size 1. `REPLICA` and `FSDP` are never
    forbidden: they shard the batch.
    """
    if size == 1 or axis in (Axis.REPLICA, Axis.FSDP):
        return ()
    mine = [rule for rule in rules if rule.axis is axis]
    if not mine:
        return (DivisibilityRule(axis=axis, logical_name=_MISSING[axis], dim_size=1, is_required=True),)
    wrong = [rule for rule in mine if not is_divisible(rule, size)]
    required = tuple(rule for rule in wrong if rule.is_required)
    return tuple(wrong) if len(wrong) == len(mine) else required


_MISSING: dict[Axis, str] = {
    Axis.TENSOR: "heads or mlp",
    Axis.SEQUENCE: "tokens",
    Axis.EXPERT: "experts",
    Axis.PIPELINE: "layers",
}


def find_axis_sizes(program_cost: ProgramCost, axis: Axis, at_most: int) -> tuple[int, ...]:
    """Return the sizes of an axis that the program allows, in order, 1 among them."""
    if axis in (Axis.REPLICA, Axis.FSDP):
        return tuple(range(1, at_most + 1))
    rules = program_cost.divisibility_rules
    sizes = [rule.dim_size for rule in rules if rule.axis is axis]
    if axis is Axis.PIPELINE:
        return tuple(range(1, min(at_most, max(sizes, default=1)) + 1))
    candidates = {1, *itertools.chain.from_iterable(map(find_divisors, sizes))}
    return tuple(
        sorted(size for size in candidates if size <= at_most and not find_violated_rules(rules, axis, size))
    )


def find_divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, in order.

    >>> find_divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    # Divisors come in pairs (d, n / d) with d <= sqrt(n).
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({size for low in small for size in (low, number // low)}))


def require_partitionable(program_cost: ProgramCost, at_most: int) -> None:
    """Raise an error for a program that no axis can shard.

    Args:
        at_most: the largest useful size of an axis: the number of devices.

    Raises:
        CallerError: no dim has a divisor up to `at_most`; the message lists all dims.
    """
    if any(len(find_axis_sizes(program_cost, axis, at_most)) > 1 for axis in _MISSING):
        return
    # FSDP can shard any dim of the state that has a divisor from 2 to `at_most`.
    dims = {size for tensor in program_cost.tensors for size in tensor.shape}
    if any(1 < divisor <= at_most for size in dims for divisor in find_divisors(size)):
        return
    named = (
        ", ".join(sorted({f"{d.logical_name} = {d.dim_size}" for d in program_cost.divisibility_rules}))
        or "no named dim"
    )
    raise CallerError(
        f"{program_cost.name}: found dims that divide by nothing from 2 to {at_most} ({named}; sizes of parameters: "
        f"{', '.join(map(str, sorted(dims)))}), expected at least one that an axis can shard. Change the model's sizes "
        "to multiples of small numbers"
    )
