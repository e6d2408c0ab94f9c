"""The program cost of a transformer from its sizes alone, in closed form."""

from resilient_jax.planning.axes import AXIS_BY_LOGICAL_NAME, Axis
from resilient_jax.planning.program_cost import (
    DivisibilityRule,
    ModelPart,
    ProgramCost,
    StateTensor,
    TensorRole,
)
from resilient_jax.planning.transformer import TransformerShape, get_dim_size, list_parameters
from resilient_jax.planning.transformer_operations import AttentionKind
from resilient_jax.planning.transformer_parts import (
    MIXED_PRECISION,
    Precision,
    analyze_embedding,
    analyze_head,
    analyze_layer,
)


def analyze_transformer(
    shape: TransformerShape,
    *,
    name: str = "transformer",
    precision: Precision = MIXED_PRECISION,
    attention: AttentionKind = AttentionKind.BLOCKS,
) -> ProgramCost:
    """Return the cost of a program that trains a transformer of this shape with next-token cross-entropy.

    The formulas are in `transformer_operations` and `transformer_parts`. Residuals and bytes moved assume that only
    matrix products, norms and attention write to memory. XLA on CPU writes more: measure with `analyze_program`, or
    calibrate, where that matters.

    Args:
        shape: the sizes; `load_model_shape` reads them from a file.
        name: name of the model in messages.
        precision: bytes of an element, by what it is.
        attention: how the program computes attention.

    Example:
        >>> shape = TransformerShape(layers=32, width=4096, heads=32, kv_heads=32, head_dim=128, feed_forward=11008,
        ...                          vocabulary_tokens=32000, sequence_tokens=4096)
        >>> cost = analyze_transformer(shape, name="Llama 2 7B")
        >>> cost.parameter_count, cost.layers
        (6738415616, 32)
    """
    return ProgramCost(
        name=name,
        source=f"closed form; attention: {attention}",
        sequence_tokens=shape.sequence_tokens,
        compute_bytes=precision.compute_bytes,
        gradient_bytes=precision.gradient_bytes,
        tensors=_list_tensors(shape, precision),
        parts=(
            analyze_embedding(shape, precision),
            analyze_layer(shape, precision, attention),
            analyze_head(shape, precision),
        ),
        divisibility_rules=_list_rules(shape),
    )


def _list_tensors(shape: TransformerShape, precision: Precision) -> tuple[StateTensor, ...]:
    roles = [("", TensorRole.PARAMETER, precision.parameter_bytes)]
    roles += [
        (f"optimizer/{i}/", TensorRole.OPTIMIZER, size) for i, size in enumerate(precision.optimizer_bytes)
    ]
    return tuple(
        StateTensor(
            path=prefix + parameter.path,
            role=role,
            parts=parameter.parts,
            shape=sizes,
            logical_names=parameter.logical_names,
            axes=tuple(AXIS_BY_LOGICAL_NAME[name] for name in parameter.logical_names),
            units=sizes,
            dtype_bytes=dtype_bytes,
            copies=shape.layers if parameter.parts == (ModelPart.LAYER,) else 1,
        )
        for prefix, role, dtype_bytes in roles
        for parameter in list_parameters(shape)
        for sizes in [tuple(get_dim_size(shape, name) for name in parameter.logical_names)]
    )


def _list_rules(shape: TransformerShape) -> tuple[DivisibilityRule, ...]:
    # Heads, feed-forward width, tokens and experts must be divisible; keys, values and vocabulary are replicated
    # otherwise.
    sizes = (
        (Axis.TENSOR, "heads", shape.heads, True),
        (Axis.TENSOR, "mlp", shape.feed_forward, True),
        (Axis.TENSOR, "kv_heads", shape.kv_heads, False),
        (Axis.TENSOR, "vocab", shape.vocabulary_tokens, False),
        (Axis.SEQUENCE, "tokens", shape.sequence_tokens, True),
        (Axis.EXPERT, "experts", shape.experts, True),
        (Axis.PIPELINE, "layers", shape.layers, True),
    )
    return tuple(
        DivisibilityRule(axis=a, logical_name=n, dim_size=size, is_required=r) for a, n, size, r in sizes
    )
