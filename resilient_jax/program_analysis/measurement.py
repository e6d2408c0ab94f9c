"""Measured cost of a training program, by XLA's count: per example, and independent of the batch."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resilient_jax.program_analysis.abstract_program import AbstractProgram, count_examples, resize_batch
from resilient_jax.program_analysis.operations import trace_operations
from resilient_jax.program_analysis.sharding_propagation import count_matmul_flops
from resilient_jax.program_analysis.xla_cost import (
    CompiledProgram,
    ShardedArguments,
    compile_and_analyze,
    count_flops,
)
from resilient_jax.sharding.logical_axes import Tree


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """The measured cost of a program.

    Attributes:
        forward_flops, gradient_flops: FLOPs of one example, as XLA counts them before it optimizes the program; the
            gradient's include the forward pass.
        gradient_matmul_flops: FLOPs of the matrix products among `gradient_flops`.
        bytes_moved: bytes that one example's gradient reads and writes, as compiled for the default device.
        temporary_bytes: memory beyond arguments that one example's gradient needs.
        fixed_bytes: memory beyond arguments that does not depend on the batch: the part of the gradient that does not
            reuse the buffers of activations.
    """

    forward_flops: float
    gradient_flops: float
    gradient_matmul_flops: float
    bytes_moved: float
    temporary_bytes: float
    fixed_bytes: float


class TemporaryMemory(NamedTuple):
    """Memory beyond arguments in bytes: per example, and independent of the batch."""

    per_example: float
    fixed: float


def measure_cost(program: AbstractProgram) -> MeasuredCost:
    """Return the cost of a program's loss and gradient; the gradient is compiled for two batch sizes."""
    examples, single, double = count_examples(program.batch), program.batch, resize_batch(program.batch, 2)
    gradient = jax.value_and_grad(program.loss_fn)

    def slope(one: float, two: float) -> float:
        # (cost(2 n) - cost(n)) / n for n examples: what does not depend on the batch cancels.
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
    """Return the memory that a program's gradient needs beyond its arguments."""
    return _split(*_compile_twice(program), count_examples(program.batch))


def _split(one: CompiledProgram, two: CompiledProgram, examples: int) -> TemporaryMemory:
    # bytes(n) = fixed + per_example * n, from n = examples and n = 2 * examples. XLA packs a small program better, so
    # `fixed` could come out negative; then all bytes count as the examples'.
    slope = (two.temporary_bytes - one.temporary_bytes) / examples
    per_example = min(slope, two.temporary_bytes / (2 * examples))
    return TemporaryMemory(per_example=per_example, fixed=two.temporary_bytes - per_example * 2 * examples)


def _compile_twice(program: AbstractProgram) -> tuple[CompiledProgram, CompiledProgram]:
    """Compile the gradient for a batch and for one of twice as many examples, for two devices where there are two.

    XLA orders a program with collectives differently. Seen on CPU: the gradient of a decoder layer by layer needed 17 %
    more memory for one device than on each of two or of eight.
    """
    gradient = jax.value_and_grad(program.loss_fn)

    def compile_for(batch: Tree) -> CompiledProgram:
        arguments = (program.params, program.others, batch)
        return compile_and_analyze(gradient, *arguments, sharded_arguments=_shard_arguments(program, batch))

    return compile_for(program.batch), compile_for(resize_batch(program.batch, 2))


def _shard_arguments(program: AbstractProgram, batch: Tree) -> ShardedArguments | None:
    devices = jax.local_devices()[:2]
    if len(devices) < 2:
        return None
    mesh = Mesh(np.array(devices), ("replica",))
    replicated, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))
    return ShardedArguments(
        arguments=(program.params, program.others, resize_batch(batch, mesh.size)),
        in_shardings=(replicated, replicated, sharded),
        out_shardings=replicated,
    )


def count_gradient_matmul_flops(program: AbstractProgram) -> float:
    """Return the FLOPs of the matrix products in the gradient of one example, the forward pass included."""
    trace = trace_operations(
        jax.value_and_grad(program.loss_fn), program.params, program.others, program.batch
    )
    return count_matmul_flops(trace) / count_examples(program.batch)
