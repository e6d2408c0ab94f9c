"""What a training program costs by XLA's count: for each example, and whatever the batch."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resilient_jax.program_cost.abstract_program import AbstractProgram, count_examples, resize_batch
from resilient_jax.program_cost.operations import trace_operations
from resilient_jax.program_cost.sharding_propagation import count_matmul_flops
from resilient_jax.program_cost.xla_cost import (
    CompiledProgram,
    ShardedArguments,
    compile_and_analyze,
    count_flops,
)
from resilient_jax.sharding.logical_axes import Tree


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """A program's cost.

    Attributes:
        forward_flops, gradient_flops: of one example; the gradient's with the forward pass. As XLA counts them before
            it has changed the program.
        gradient_matmul_flops: matrix products among `gradient_flops`.
        bytes_moved: by one example's gradient, as compiled for the default device.
        temporary_bytes: memory beyond arguments that one example's gradient needs.
        fixed_bytes: the same, whatever the batch: of the gradient itself, what is not written where activations were.
    """

    forward_flops: float
    gradient_flops: float
    gradient_matmul_flops: float
    bytes_moved: float
    temporary_bytes: float
    fixed_bytes: float


class TemporaryMemory(NamedTuple):
    """Memory beyond arguments: of each example, and whatever the batch."""

    per_example: float
    fixed: float


def measure_cost(program: AbstractProgram) -> MeasuredCost:
    """Gives the cost of a program's loss and gradient; compiles the gradient for two sizes of the batch."""
    examples, single, double = count_examples(program.batch), program.batch, resize_batch(program.batch, 2)
    gradient = jax.value_and_grad(program.loss_fn)

    def slope(one: float, two: float) -> float:
        return (two - one) / examples

    flops = [
        slope(*(count_flops(function, program.params, program.others, batch) for batch in (single, double)))
        for function in (program.loss_fn, gradient)
    ]
    one, two = _compile_twice(program)
    temporary = _split(one, two, examples)
    return MeasuredCost(
        forward_flops=flops[0],
        gradient_flops=flops[1],
        gradient_matmul_flops=count_gradient_matmul_flops(program),
        bytes_moved=slope(one.cost.bytes_moved, two.cost.bytes_moved),
        temporary_bytes=temporary.per_example,
        fixed_bytes=temporary.fixed,
    )


def measure_temporary_memory(program: AbstractProgram) -> TemporaryMemory:
    """Gives the memory that a program's gradient needs beyond its arguments."""
    return _split(*_compile_twice(program), count_examples(program.batch))


def _split(one: CompiledProgram, two: CompiledProgram, examples: int) -> TemporaryMemory:
    # XLA packs a small program better: what would be less than nothing for no examples is laid on all examples.
    slope = (two.temporary_bytes - one.temporary_bytes) / examples
    each = min(slope, two.temporary_bytes / (2 * examples))
    return TemporaryMemory(per_example=each, fixed=two.temporary_bytes - each * 2 * examples)


def _compile_twice(program: AbstractProgram) -> tuple[CompiledProgram, CompiledProgram]:
    """The gradient for a batch and for one of twice the examples, on each of two devices where there are two.

    With collectives in it XLA orders a program otherwise. Seen on CPU: the gradient of a decoder layer by layer needed
    17 % more memory for one device than the same for each of two or of eight.
    """
    gradient = jax.value_and_grad(program.loss_fn)
    found = []
    for times in (1, 2):
        batch = resize_batch(program.batch, times)
        spread = _spread(program, batch)
        found.append(
            compile_and_analyze(gradient, program.params, program.others, batch, sharded_arguments=spread)
        )
    return found[0], found[1]


def _spread(program: AbstractProgram, batch: Tree) -> ShardedArguments | None:
    mesh = _mesh("replica")
    if mesh is None:
        return None
    same, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))
    arguments = (program.params, program.others, resize_batch(batch, mesh.size))
    return ShardedArguments(arguments=arguments, in_shardings=(same, same, cut), out_shardings=same)


def _mesh(axis: str) -> Mesh | None:
    devices = jax.local_devices()[:2]
    return Mesh(np.array(devices), (axis,)) if len(devices) == 2 else None


def count_gradient_matmul_flops(program: AbstractProgram) -> float:
    """Gives the FLOPs of matrix products in the gradient of one example, the forward pass among them."""
    operations = trace_operations(
        jax.value_and_grad(program.loss_fn), program.params, program.others, program.batch
    )
    return count_matmul_flops(operations) / count_examples(program.batch)
