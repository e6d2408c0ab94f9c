"""The profile of a program, taken from the program itself.

What is divided is measured: FLOPs, bytes and memory are XLA's, for a batch and for one twice as large; the difference
is what the examples cost, the rest is there whatever the batch. How they are divided, by part and by what cuts them, is
followed through the operations from the parameters' names (`attribution`).
"""

import dataclasses
from typing import Any

import jax

from resilient_jax.errors import CallerError
from resilient_jax.planning.program_cost import ProgramCost, TensorRole
from resilient_jax.program_cost.abstract_program import AbstractProgram, LossFn, make_abstract_program
from resilient_jax.program_cost.cost_split import TracedProgram, split_cost, trace_program
from resilient_jax.program_cost.measurement import (
    count_gradient_matmul_flops,
    measure_cost,
    measure_temporary_memory,
)
from resilient_jax.program_cost.operations import has_while_loop
from resilient_jax.sharding.logical_axes import LogicalAxisRules, Tree
from resilient_jax.sharding.state_tensors import (
    ParameterInfo,
    describe_parameters,
    find_divisors,
    make_state_tensors,
)


def analyze_program(
    model: object,
    loss_fn: LossFn,
    batch: Tree,
    *,
    name: str,
    optimizer: Any = None,  # noqa: ANN401 - an optax.GradientTransformation
    logical_axis_rules: LogicalAxisRules | None = None,
    sequence_tokens: int | None = None,
    remat_model: object = None,
) -> ProgramCost:
    """Gives the profile of a training program, from the model itself; no array is made, no device computes.

    The gradient of `loss` is compiled twice for JAX's default device, which may be the CPU: for this batch and for one
    twice as large. FLOPs are those of the program before XLA changes it, so they do not depend on the device; bytes
    moved and memory do. A layer's parameters are found by their paths (`blocks/0/...`) or by a dim named "layers".

    Args:
        model: as the trainer takes it: what makes an `nnx.Module`, a `flax.linen.Module`, or `init(key)`.
        loss: gets the model and a batch; gives a scalar, or a tuple that begins with one.
        batch: of one microbatch, arrays or `jax.ShapeDtypeStruct`s; the first dim of each is the examples'. Two or more
            examples: with one, XLA makes other programs.
        name: of the model, for people.
        optimizer: from optax; None: the state is parameters alone.
        naming: logical names, where the model has none or others.
        sequence_tokens: in an example, if `Axis.SEQUENCE` may cut it.
        rematerialised: the same model with its layers rematerialised; None: a plan cannot have that.

    Raises:
        CallerError: the model, the loss, the batch or the names do not fit; the message says which and why.

    Example:
        >>> import jax.numpy as jnp
        >>> profile = profile_of(
        ...     lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))},
        ...     lambda params, x: jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]),
        ...     jax.ShapeDtypeStruct((8, 64), jnp.float32),
        ...     name="two layers",
        ...     naming=Naming(rules=[("up", ("embed", "mlp")), ("down", ("mlp", "embed"))]),
        ... )
        >>> profile.parameters, profile.forward_flops.tensor
        (32768, 65536.0)
    """
    logical_axis_rules = logical_axis_rules or LogicalAxisRules()
    program = make_abstract_program(model, loss_fn, batch)
    parameters = describe_parameters(program.params, program.names, logical_axis_rules)
    traced = trace_program(program, parameters, logical_axis_rules)
    again = _trace_again(remat_model, loss_fn, program, parameters, logical_axis_rules)
    measured = measure_cost(program)
    tensors = make_state_tensors(parameters, traced.uses, _others(program, optimizer), logical_axis_rules)
    return ProgramCost(
        name=name,
        source=_describe_source(program),
        sequence_tokens=sequence_tokens,
        compute_bytes=traced.compute_bytes,
        gradient_bytes=max((info.itemsize for info in parameters), default=4),
        tensors=tensors,
        parts=split_cost(traced, again, measured),
        divisibility_rules=find_divisors(tensors, traced.num_layers, sequence_tokens),
        fixed_bytes=measured.fixed_bytes,
        backend=jax.default_backend(),
        can_remat=again is not None,
    )


def _others(program: AbstractProgram, optimizer: Any) -> list[tuple[Tree, TensorRole]]:  # noqa: ANN401 - as above
    """What of the state is no parameter."""
    others: list[tuple[Tree, TensorRole]] = [(program.others, TensorRole.OTHER)]
    if optimizer is not None:
        others.append((jax.eval_shape(optimizer.init, program.params), TensorRole.OPTIMIZER))
    return others


def _trace_again(
    model: object,
    loss: LossFn,
    program: AbstractProgram,
    parameters: tuple[ParameterInfo, ...],
    naming: LogicalAxisRules,
) -> TracedProgram | None:
    """The rematerialised program, followed in the same way.

    Raises:
        CallerError: it has other parameters.
    """
    if model is None:
        return None
    again = make_abstract_program(model, loss, program.batch)
    found = {info.path: info.shape for info in describe_parameters(again.params, again.names, naming)}
    expected = {info.path: info.shape for info in parameters}
    if found != expected:
        differ = sorted(found.items() ^ expected.items())
        raise CallerError(
            f"rematerialised: found other parameters than the model's, first {differ[0][0]} of shape {differ[0][1]} in "
            "one of them only; expected the same model, with its layers rematerialised"
        )
    traced = trace_program(again, parameters, naming)
    return dataclasses.replace(
        traced,
        gradient_matmul_flops=count_gradient_matmul_flops(again),
        temporary_bytes=measure_temporary_memory(again).per_example,
    )


def _describe_source(program: AbstractProgram) -> str:
    said = f"the program itself, compiled for {jax.default_backend()} by jax {jax.__version__}"
    jaxpr = jax.make_jaxpr(program.loss_fn)(program.params, program.others, program.batch).jaxpr
    return f"{said}; a while loop of unknown turns is counted once" if has_while_loop(jaxpr) else said
