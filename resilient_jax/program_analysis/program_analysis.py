"""The cost of a training program, measured from the program itself.

Totals are XLA's: FLOPs, bytes and memory are measured for a batch and for one twice as large; the difference is the
cost of the examples, the rest does not depend on the batch. How a total is split, by part of the model and by the axis
that shards it, follows from the logical names of the parameters, propagated through the operations
(`sharding_propagation`, `cost_split`).
"""

import dataclasses
from typing import Any

import jax

from resilient_jax.errors import CallerError
from resilient_jax.planning.program_cost import ProgramCost, StateTensor, TensorRole
from resilient_jax.program_analysis.abstract_program import AbstractProgram, LossFn, make_abstract_program
from resilient_jax.program_analysis.cost_split import TracedProgram, split_cost, trace_program
from resilient_jax.program_analysis.measurement import (
    count_gradient_matmul_flops,
    measure_cost,
    measure_temporary_memory,
)
from resilient_jax.program_analysis.operations import has_while_loop
from resilient_jax.sharding.logical_axes import LogicalAxisRules, Tree
from resilient_jax.sharding.state_tensors import (
    ParameterInfo,
    describe_parameters,
    make_divisibility_rules,
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
    """Return the cost of a training program, measured from the model itself; no array is made, no device computes.

    The gradient of `loss_fn` is compiled twice for JAX's default device, which may be the CPU: for this batch and for
    one twice as large. FLOPs are those of the program before XLA optimizes it, so they do not depend on the device;
    bytes moved and memory do. A layer's parameters are found by their paths (`blocks/0/...`) or by a dim named
    "layers".

    Args:
        model: as the trainer takes it: what makes an `nnx.Module`, a `flax.linen.Module`, or `init(key)`.
        loss_fn: gets the model and a batch, and returns a scalar, a `WeightedMean`, or a tuple that begins with one.
        batch: a microbatch of two or more examples (with one, XLA makes other programs): a tree of arrays or of
            `jax.ShapeDtypeStruct`; the first dim of each is the batch dim.
        name: the model's name, for display.
        optimizer: a transformation of Optax; None: the state has parameters alone.
        logical_axis_rules: logical names, where the model has none or others.
        sequence_tokens: tokens of an example, if `Axis.SEQUENCE` may shard an example.
        remat_model: the same model with its layers rematerialized; None: plans cannot use rematerialization.

    Raises:
        CallerError: the model, the loss, the batch or the names do not fit; the message says which and why.

    Example:
        >>> import jax.numpy as jnp
        >>> cost = analyze_program(
        ...     lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))},
        ...     lambda params, x: jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]),
        ...     jax.ShapeDtypeStruct((8, 64), jnp.float32),
        ...     name="two layers",
        ...     logical_axis_rules=LogicalAxisRules(
        ...         names_by_path=[("up", ("embed", "mlp")), ("down", ("mlp", "embed"))]
        ...     ),
        ... )
        >>> cost.parameter_count, cost.forward_flops.tensor
        (32768, 65536.0)
    """
    logical_axis_rules = logical_axis_rules or LogicalAxisRules()
    program = make_abstract_program(model, loss_fn, batch)
    parameters = describe_parameters(program.params, program.names, logical_axis_rules)
    traced = trace_program(program, parameters, logical_axis_rules)
    remat = _trace_remat(remat_model, loss_fn, program, parameters, logical_axis_rules)
    measured = measure_cost(program)
    tensors = make_state_tensors(
        parameters, traced.uses, _list_others(program, optimizer), logical_axis_rules
    )
    return ProgramCost(
        name=name,
        source=_describe_source(program),
        sequence_tokens=sequence_tokens,
        compute_bytes=traced.compute_bytes,
        gradient_bytes=max((info.itemsize for info in parameters), default=4),
        tensors=tensors,
        parts=split_cost(traced, remat, measured),
        divisibility_rules=make_divisibility_rules(tensors, traced.num_layers, sequence_tokens),
        fixed_bytes=measured.fixed_bytes,
        backend=jax.default_backend(),
        can_remat=remat is not None,
    )


def list_state_tensors(
    model: object,
    loss_fn: LossFn,
    batch: Tree,
    *,
    logical_axis_rules: LogicalAxisRules | None = None,
) -> tuple[StateTensor, ...]:
    """Return the parameters with the names of their dims, as `analyze_program` finds them; nothing is compiled."""
    rules = logical_axis_rules or LogicalAxisRules()
    program = make_abstract_program(model, loss_fn, batch)
    parameters = describe_parameters(program.params, program.names, rules)
    traced = trace_program(program, parameters, rules)
    return make_state_tensors(parameters, traced.uses, _list_others(program, None), rules)


def _list_others(program: AbstractProgram, optimizer: Any) -> list[tuple[Tree, TensorRole]]:  # noqa: ANN401 - as above
    """Return the trees of the state that are no parameters."""
    others: list[tuple[Tree, TensorRole]] = [(program.others, TensorRole.OTHER)]
    if optimizer is not None:
        others.append((jax.eval_shape(optimizer.init, program.params), TensorRole.OPTIMIZER))
    return others


def _trace_remat(
    model: object,
    loss_fn: LossFn,
    program: AbstractProgram,
    parameters: tuple[ParameterInfo, ...],
    logical_axis_rules: LogicalAxisRules,
) -> TracedProgram | None:
    """Return the trace of the rematerialized program.

    Raises:
        CallerError: the rematerialized program has other parameters.
    """
    if model is None:
        return None
    remat = make_abstract_program(model, loss_fn, program.batch)
    described = describe_parameters(remat.params, remat.names, logical_axis_rules)
    found = {info.path: info.shape for info in described}
    expected = {info.path: info.shape for info in parameters}
    if found != expected:
        differ = sorted(found.items() ^ expected.items())
        raise CallerError(
            f"remat_model: found other parameters than the model's, first {differ[0][0]} of shape {differ[0][1]} in "
            "one of them only; expected the same model, with its layers rematerialized"
        )
    traced = trace_program(remat, parameters, logical_axis_rules)
    return dataclasses.replace(
        traced,
        gradient_matmul_flops=count_gradient_matmul_flops(remat),
        temporary_bytes=measure_temporary_memory(remat).per_example,
    )


def _describe_source(program: AbstractProgram) -> str:
    source = f"the program itself, compiled for {jax.default_backend()} by jax {jax.__version__}"
    jaxpr = jax.make_jaxpr(program.loss_fn)(program.params, program.others, program.batch).jaxpr
    return f"{source}; a while loop of unknown length is counted once" if has_while_loop(jaxpr) else source
