"""What a training program costs by XLA's count: for each example, and whatever the batch."""

import dataclasses

import jax

from resilient_jax.sharding.abstract_model import AbstractProgram, count_examples, resize_batch
from resilient_jax.sharding.attribution import count_products
from resilient_jax.sharding.operations import trace_operations
from resilient_jax.sharding.xla_cost import compile_and_read, count_flops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A program's cost.

    Attributes:
        forward_flops, gradient_flops: of one example; the gradient's with the forward pass. As XLA counts them before
            it has changed the program.
        gradient_products: matrix products among `gradient_flops`.
        bytes_moved: by one example's gradient, as compiled for the default device.
        temporary_bytes: memory beyond arguments that one example's gradient needs.
        fixed_bytes: the same, whatever the batch: of the gradient itself, what is not written where activations were.
    """

    forward_flops: float
    gradient_flops: float
    gradient_products: float
    bytes_moved: float
    temporary_bytes: float
    fixed_bytes: float


def measure(program: AbstractProgram) -> Measured:
    """Gives the cost of a program's loss and gradient; compiles the gradient for two sizes of the batch."""
    examples, single, double = count_examples(program.batch), program.batch, resize_batch(program.batch, 2)
    gradient = jax.value_and_grad(program.loss)

    def slope(one: float, two: float) -> float:
        return (two - one) / examples

    flops = [
        slope(*(count_flops(function, program.params, program.others, batch) for batch in (single, double)))
        for function in (program.loss, gradient)
    ]
    one, two = (compile_and_read(gradient, program.params, program.others, b) for b in (single, double))
    # XLA packs a small program better: what would be less than nothing for no examples is laid on all examples.
    temporary = min(slope(one.temporary_bytes, two.temporary_bytes), two.temporary_bytes / (2 * examples))
    return Measured(
        forward_flops=flops[0],
        gradient_flops=flops[1],
        gradient_products=products_of_gradient(program),
        bytes_moved=slope(one.cost.bytes_moved, two.cost.bytes_moved),
        temporary_bytes=temporary,
        fixed_bytes=two.temporary_bytes - temporary * 2 * examples,
    )


def products_of_gradient(program: AbstractProgram) -> float:
    """Gives the FLOPs of matrix products in the gradient of one example, the forward pass among them."""
    operations = trace_operations(
        jax.value_and_grad(program.loss), program.params, program.others, program.batch
    )
    return count_products(operations) / count_examples(program.batch)
