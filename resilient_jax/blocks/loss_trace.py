"""The trace of a loss as one flat program with the marks of layers, of weights as `model_weights` names them.

1. The loss is traced once. Marks inside of a call are brought to the top by inlining the call, those of a layer inside
   a remat of that layer alone are made again around it; in any other transformation they are refused.
2. Without marks, a `lax.scan` over leaves of the variables is taken for the layers: each of its iterations is one. The
   program is traced again with the scan unrolled and marked, and with a weight for each layer of such a leaf.
   So is what the scan returns for each layer, where the loss returns it as a changed variable (`CHANGED`).
3. What depends on no argument at all and is a scalar, such as the counter of a random stream, is computed: equal layers
   must not differ in how often a counter was increased.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from resilient_jax.blocks.equation_slices import INLINED, REMATERIALIZED, Value, describe_var, inline_calls
from resilient_jax.blocks.layer_marks import (
    INPUT,
    OUTPUT,
    intercept_linen_layers,
    is_number_array,
    read_mark,
)
from resilient_jax.blocks.model_weights import IsTrained, Tree, WeightTable, list_weights
from resilient_jax.errors import CallerError
from resilient_jax.sharding.jaxprs import (
    bind_equation,
    get_body,
    get_scan_arity,
    inner_jaxprs,
    iterate_equations,
    unwrap_jaxpr,
    walk,
)
from resilient_jax.sharding.logical_axes import format_path

LossOfVariables = Callable[[Tree, Tree, Any], Any]
"""`loss(variables, batch, key)` returns a scalar, or a scalar and a tree of arrays; the key may be a tree with one."""
EXPECTED_LAYERS: Final = (
    "expected a Linen model or, by blocks.layer_marks.mark_layers(net), an NNX model with a list of layers whose "
    "parameters are equal in number and shape; a lax.scan over parameters that are stacked along their first dim; or "
    "layers called by blocks.layer_marks.mark_layer(layer, ...)"
)
CHANGED: Final = "changed variables"
"""The key, in the dict that a loss returns beside its value, of a tree like the variables: new values of some of them.
Their names as results are those of the weights, after this and a slash."""
TRANSFORMATIONS: Final = {
    "checkpoint": "a jax.checkpoint (remat) around several layers",
    "remat2": "a jax.checkpoint (remat) around several layers",
    "scan": "a lax.scan",
    "while": "a lax.while_loop or fori_loop",
    "cond": "a lax.cond or switch",
    "custom_vjp_call": "a jax.custom_vjp function",
    "custom_jvp_call": "a jax.custom_jvp function",
    "shard_map": "a jax.shard_map",
}
"""What a user calls a primitive."""
_LAYERWISE: Final = frozenset(
    {"convert_element_type", "copy", "reduce_precision", "stop_gradient", "neg", "mul", "div"}
)
"""Primitives that commute with taking a layer of a stack, if their other operands are scalars."""
_ELEMENTWISE: Final = frozenset({"add", "sub", "mul", "div", "select_n"})
"""Primitives of operands of one shape or none, which commute with taking a layer of each of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossTrace:
    """A loss as one flat program.

    Attributes:
        closed: program of the weights, then the leaves of the batch, then the leaves of the key; returns the loss, then
            the leaves of the auxiliary output.
        result_names: names of the outputs: `loss`, and the paths of auxiliary outputs.
    """

    closed: core.ClosedJaxpr
    table: WeightTable
    result_names: tuple[str, ...]
    aux_treedef: Any


def trace_loss(
    loss: LossOfVariables,
    variables: Tree,
    batch: Tree,
    key: Any,  # noqa: ANN401 - a random key, or its shape
    is_trained: IsTrained,
) -> LossTrace:
    """Trace a loss, whose arguments may be shapes.

    Raises:
        CallerError: no layers are found, or their marks are where a program cannot be cut; the result is no loss.
    """

    def with_aux(variables: Tree, batch: Tree, key: jax.Array) -> tuple[Value, Tree]:
        found = loss(variables, batch, key)
        value, aux = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return _check_loss(value), aux

    with intercept_linen_layers(_list_trained(variables, is_trained)):
        traced, (_, aux) = jax.make_jaxpr(with_aux, return_shape=True)(variables, batch, key)
    _refuse_hidden_marks(traced)
    closed = inline_calls(traced)
    table = list_weights(variables, is_trained)
    scans: list[core.JaxprEqn] = []
    if not _list_calls(closed):
        scans, leaves = _find_layer_scans(closed.jaxpr, len(table.weights))
        if not scans:
            raise CallerError(f"loss: found no layers at which the model could be cut, {EXPECTED_LAYERS}")
        table = list_weights(variables, is_trained, leaves)
    paths, aux_treedef = jax.tree_util.tree_flatten_with_path(aux)
    names = ["loss", *(format_path(path) for path, _ in paths)]
    splits = [_count_layers(name, table) for name in names]
    return LossTrace(
        closed=_Flattener(closed, table, scans, splits).trace(),
        table=table,
        result_names=tuple(
            part
            for name, count in zip(names, splits, strict=True)
            for part in ([name] if count is None else [f"{name}[{layer}]" for layer in range(count)])
        ),
        aux_treedef=aux_treedef,
    )


def _list_trained(variables: Tree, is_trained: IsTrained) -> Tree:
    """Return the variables that are trained, with None in place of others: layers are found among these."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_trained(format_path(path), leaf) else None, variables
    )


def _count_layers(name: str, table: WeightTable) -> int | None:
    """Return of how many layers a result is a changed variable that is stacked over layers; None: it is none."""
    path = name.removeprefix(f"{CHANGED}/")
    layers = [weight for weight in table.weights if weight.path == path and weight.layer is not None]
    return len(layers) if path != name and layers else None


def _check_loss(value: Any) -> jax.Array:  # noqa: ANN401 - the result of a user's function
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise CallerError(
            f"loss: found {getattr(value, 'aval', type(value).__name__)} as its result, expected one floating-point "
            "number, or that and a tree of arrays: return the mean over the batch"
        )
    return value


def _refuse_hidden_marks(jaxpr: Any, inside: tuple[str, ...] = ()) -> None:  # noqa: ANN401 - closed or not
    """Check that all marks are at the top of a program, or in calls there.

    Raises:
        CallerError: a mark is inside a transformation, which the message names.
    """
    for equation in unwrap_jaxpr(jaxpr).eqns:
        name = equation.primitive.name
        if not inside and name in REMATERIALIZED and len(_list_calls(get_body(equation))) == 1:
            continue
        if inside and read_mark(equation) is not None:
            raise CallerError(
                f"loss: found layers called inside {TRANSFORMATIONS.get(inside[0], f'the primitive {inside[0]!r}')}, "
                "expected the calls of layers outside of any transformation but jit. Apply it to each layer alone, as "
                "nn.remat(Layer) or nnx.remat(Layer.__call__) does, or ask for remat where the model is cut"
            )
        entered = inside if name in INLINED else (*inside, name)
        for inner in inner_jaxprs(equation):
            _refuse_hidden_marks(inner, entered)


def _list_calls(jaxpr: Any) -> set[int]:  # noqa: ANN401 - closed or not
    """Return the layers' calls that are marked anywhere in a program."""
    return {mark.call for equation in iterate_equations(jaxpr) if (mark := read_mark(equation))}


# Scans over layers.


def _find_layer_scans(jaxpr: core.Jaxpr, num_leaves: int) -> tuple[list[core.JaxprEqn], dict[int, int]]:
    """Return the scans over leaves of the variables, and of each such leaf the number of its layers."""
    scans: list[core.JaxprEqn] = []
    lengths: dict[int, int] = {}

    def apply(equation: core.JaxprEqn, operands: tuple[int | None, ...]) -> list[int | None]:
        if equation.primitive.name == "scan":
            consts, carries = get_scan_arity(equation)
            leaves = [leaf for leaf in operands[consts + carries :] if leaf is not None]
            if leaves and equation.params["length"] > 1:
                scans.append(equation)
                lengths.update((leaf, equation.params["length"]) for leaf in leaves)
        kept = [leaf for leaf in operands if leaf is not None]
        passes = len(kept) == 1 and _is_layerwise(equation)
        return [kept[0] if passes else None] * len(equation.outvars)

    inputs = [
        number if number < num_leaves and describe_var(var).shape else None
        for number, var in enumerate(jaxpr.invars)
    ]
    walk(jaxpr, inputs, apply, read_constant=lambda *_: None)
    return scans, lengths


def _is_layerwise(equation: core.JaxprEqn) -> bool:
    shapes = [describe_var(atom).shape for atom in equation.invars]
    return equation.primitive.name in _LAYERWISE and sum(bool(shape) for shape in shapes) == 1


class _Stack(NamedTuple):
    """A value that is stacked over layers, as its layers."""

    layers: tuple[Value, ...]


class _Flattener:
    """Traces a program again: with scalars that depend on no argument computed, and with these scans unrolled."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        table: WeightTable,
        scans: Sequence[core.JaxprEqn],
        splits: Sequence[int | None],
    ) -> None:
        """Prepare it; `splits` are the numbers of layers as which outputs are returned."""
        self._closed, self._table, self._splits = closed, table, splits
        self._scans = {id(scan) for scan in scans}

    def trace(self) -> core.ClosedJaxpr:
        """Return the program of the table's weights."""
        others = map(describe_var, self._closed.jaxpr.invars[self._table.treedef.num_leaves :])
        return jax.make_jaxpr(self._run)(*(weight.describe() for weight in self._table.weights), *others)

    def _run(self, *inputs: Value) -> list[Value]:
        weights, others = inputs[: len(self._table.weights)], inputs[len(self._table.weights) :]
        leaves: list[Any] = [None] * self._table.treedef.num_leaves
        for weight, value in zip(self._table.weights, weights, strict=True):
            before = leaves[weight.leaf].layers if leaves[weight.leaf] else ()
            leaves[weight.leaf] = value if weight.layer is None else _Stack((*before, value))
        outputs = self._interpret(self._closed, [*leaves, *others])
        found: list[Value] = []
        for output, count in zip(outputs, self._splits, strict=True):
            found += (
                [_join_stack(output)]
                if count is None
                else [_take_layer(output, layer) for layer in range(count)]
            )
        return found

    def _interpret(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:  # noqa: ANN401 - closed or not
        return walk(
            jaxpr,
            inputs,
            self._apply,
            read_constant=lambda _, content: content,
            read_literal=lambda aval, content: np.asarray(content, aval.dtype)[()],
        )

    def _apply(self, equation: core.JaxprEqn, operands: tuple[Value, ...]) -> Sequence[Value]:
        if id(equation) in self._scans:
            return self._unroll(equation, operands)
        if any(isinstance(operand, _Stack) for operand in operands):
            return _apply_to_stacks(equation, operands)
        if equation.primitive.name in INLINED:
            return self._interpret(get_body(equation), operands)
        if equation.primitive.name in REMATERIALIZED:
            for call in _list_calls(get_body(equation)):
                results = bind_equation(equation, _mark_all(operands, f"{INPUT}{call}"))
                return _mark_all(results, f"{OUTPUT}{call}")
        if _is_constant(equation, operands):
            with jax.ensure_compile_time_eval():
                return [np.asarray(result)[()] for result in bind_equation(equation, operands)]
        return bind_equation(equation, operands)

    def _unroll(self, scan: core.JaxprEqn, operands: tuple[Value, ...]) -> list[Value]:
        """Evaluate a scan iteration by iteration, with a mark before each and after the last."""
        consts, carries = get_scan_arity(scan)
        body, length = get_body(scan), scan.params["length"]
        fixed = [_join_stack(operand) for operand in operands[:consts]]
        carry = [_join_stack(operand) for operand in operands[consts : consts + carries]]
        outputs: dict[int, list[Value]] = {}
        for iteration in range(length):
            layer = length - 1 - iteration if scan.params["reverse"] else iteration
            carry = _mark_all(carry, f"{INPUT}{layer}")
            scanned = [_take_layer(operand, layer) for operand in operands[consts + carries :]]
            results = self._interpret(body, [*fixed, *carry, *scanned])
            carry, outputs[layer] = results[:carries], results[carries:]
        stacked = zip(*(outputs[layer] for layer in range(length)), strict=True)
        return [*_mark_all(carry, f"{OUTPUT}0"), *map(_Stack, stacked)]


def _apply_to_stacks(equation: core.JaxprEqn, operands: tuple[Value, ...]) -> Sequence[Value]:
    """Apply an equation to each layer of a stack where it allows that, else to the whole stack."""
    if not _is_layerwise(equation) and equation.primitive.name not in _ELEMENTWISE:
        return bind_equation(equation, list(map(_join_stack, operands)))
    count = next(len(operand.layers) for operand in operands if isinstance(operand, _Stack))
    layers = [
        bind_equation(equation, [_get_layer(operand, layer) for operand in operands])[0]
        for layer in range(count)
    ]
    return [_Stack(tuple(layers))]


def _get_layer(operand: Value, layer: int) -> Value:
    is_shared = not isinstance(operand, _Stack) and np.shape(operand) == ()
    return operand if is_shared else _take_layer(operand, layer)


def _take_layer(operand: Value, layer: int) -> Value:
    if isinstance(operand, _Stack):
        return operand.layers[layer]
    # The index is an operand, so that layers have the same equations.
    return jax.lax.dynamic_index_in_dim(operand, np.int32(layer), 0, keepdims=False)


def _join_stack(operand: Value) -> Value:
    return jnp.stack(operand.layers) if isinstance(operand, _Stack) else operand


def _mark_all(values: Sequence[Value], text: str) -> list[Value]:
    return [checkpoint_name(value, text) if is_number_array(value) else value for value in values]


def _is_scalar_number(aval: Any) -> bool:  # noqa: ANN401 - of an array
    # Random keys have shape (), too, and a dtype of JAX's own.
    return aval.shape == () and isinstance(aval.dtype, np.dtype) and aval.dtype.kind in "biuf"


def _is_constant(equation: core.JaxprEqn, operands: Sequence[Value]) -> bool:
    """Return whether an equation computes numbers, each one scalar, from scalars that are known."""
    results = [var.aval for var in equation.outvars]
    return (
        all(isinstance(operand, np.generic) for operand in operands)
        and not equation.effects
        and all(_is_scalar_number(aval) for aval in results)
    )
