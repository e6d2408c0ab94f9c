"""A model without arrays: shapes, logical names, and the loss as a function of its parameters; no device is used.

Models are as `Trainer` takes them: a function that makes an `nnx.Module`, a `flax.linen.Module`, or `init(key)`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from resilient_jax.errors import CallerError
from resilient_jax.planning.device_order import MESH_AXES
from resilient_jax.sharding.logical_axes import (
    LogicalNames,
    Tree,
    format_path,
    get_linen_names,
    get_nnx_names,
)
from resilient_jax.sharding.trace_mesh import make_trace_mesh, use_trace_mesh
from resilient_jax.weighted_mean import WeightedMean

LossFn = Callable[[Any, Tree], Any]
"""Gets the model (of a plain function: its tree) and a batch, and returns a scalar, a `WeightedMean`, or a tuple that
begins with one of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractProgram:
    """A loss function and the shapes of its arguments.

    Attributes:
        loss_fn: a pure function `(params, others, batch)` to a scalar.
        params: `jax.ShapeDtypeStruct` objects of what has a gradient.
        others: `jax.ShapeDtypeStruct` objects of statistics, constants and random streams.
        batch: `jax.ShapeDtypeStruct` objects of one microbatch.
        names: logical names in the model's metadata, by path in `params`.
    """

    loss_fn: Callable[[Tree, Tree, Tree], jax.Array]
    params: Tree
    others: Tree
    batch: Tree
    names: dict[str, LogicalNames]


def make_abstract_program(model: object, loss_fn: LossFn, batch: Tree) -> AbstractProgram:
    """Return the program that computes `loss_fn(model, batch)`.

    Args:
        model: a model as the trainer takes it.
        loss_fn: loss of one microbatch.
        batch: arrays or `jax.ShapeDtypeStruct` objects; the first dim of each is the batch dim.

    Raises:
        CallerError: `model` is no model, has no parameters or some without a gradient, or the loss is no scalar of a
            floating-point type.
    """
    batch, loss_fn = jax.tree.map(_shape_of, batch), _trace_under_plan_mesh(loss_fn)
    if isinstance(model, nn.Module):
        program = _linen_program(model, loss_fn, batch)
    elif callable(model) and not isinstance(model, nnx.Module):
        program = (
            _nnx_program(model, loss_fn, batch)
            if _makes_nnx(model)
            else _plain_program(model, loss_fn, batch)
        )
    else:
        raise CallerError(
            f"model: found a {type(model).__name__}, expected a function lambda rngs: Net(..., rngs=rngs) that makes "
            "an nnx.Module, a flax.linen.Module, or a function init(key) that makes a tree of arrays"
        )
    _check_parameters(program.params)
    result = jax.eval_shape(program.loss_fn, program.params, program.others, program.batch)
    if getattr(result, "shape", None) == () and not jnp.issubdtype(result.dtype, jnp.floating):
        raise CallerError(
            f"loss_fn: found a scalar of {result.dtype}, expected a floating-point type, which has a gradient"
        )
    if getattr(result, "shape", None) != ():
        raise CallerError(
            f"loss_fn: found a result {result}, expected a scalar, an rj.WeightedMean, or a tuple that begins with one"
        )
    return program


def _trace_under_plan_mesh(loss_fn: LossFn) -> LossFn:
    """Return the loss for models that name axes of a plan's mesh in a bare `PartitionSpec`; each has size 1 here."""
    mesh = make_trace_mesh([axis.value for axis in MESH_AXES])

    @functools.wraps(loss_fn)
    def trace(model: Any, batch: Tree) -> Any:  # noqa: ANN401 - as the loss
        with use_trace_mesh(mesh):
            return loss_fn(model, batch)

    return trace


def _check_parameters(params: Tree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise CallerError(
            "model: found no parameters (nnx.Param, the collection params, or what init gives), expected at least one"
        )
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise CallerError(
                f"model: found the parameter {format_path(path)} of {leaf.dtype}, expected a dtype that has a "
                "gradient. Keep others in nnx.Variable, in another collection, or in the batch"
            )


def _nnx_program(factory: Callable[..., Any], loss_fn: LossFn, batch: Tree) -> AbstractProgram:
    # Else variables with names need a mesh whose axes have these names.
    with nnx.use_eager_sharding(False):
        net = nnx.eval_shape(lambda: factory(rngs=nnx.Rngs(0)))
    graph, params, others = nnx.split(net, nnx.Param, ...)

    def compute(params: Tree, others: Tree, batch: Tree) -> jax.Array:
        with nnx.use_eager_sharding(False):
            return _scalar(loss_fn(nnx.merge(graph, params, others), batch))

    return AbstractProgram(
        loss_fn=compute,
        params=nnx.to_pure_dict(params),
        others=nnx.to_pure_dict(others),
        batch=batch,
        names=get_nnx_names(params),
    )


def _linen_program(module: nn.Module, loss_fn: LossFn, batch: Tree) -> AbstractProgram:
    def init(key: jax.Array, batch: Tree) -> Tree:
        return dict(nn.init(functools.partial(_apply_loss, loss_fn, batch), module)({"params": key}))

    boxed = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), batch)
    variables = nn.unbox(boxed)

    def compute(params: Tree, others: Tree, batch: Tree) -> jax.Array:
        bound = {"params": params, **others}
        use = functools.partial(_apply_loss, loss_fn, batch)
        # Only the shapes of random arrays matter here, so one key is enough for every stream.
        out, _ = nn.apply(use, module, mutable=True)(bound, rngs={"params": jax.random.key(0)})
        return _scalar(out)

    params = variables.pop("params", {})
    return AbstractProgram(
        loss_fn=compute,
        params=params,
        others=variables,
        batch=batch,
        names=get_linen_names(boxed.get("params", {})),
    )


def _apply_loss(loss_fn: LossFn, batch: Tree, model: nn.Module) -> Any:  # noqa: ANN401 - what the user's loss returns
    return loss_fn(model, batch)


def _plain_program(init: Callable[..., Any], loss_fn: LossFn, batch: Tree) -> AbstractProgram:
    return AbstractProgram(
        loss_fn=lambda params, others, batch: _scalar(loss_fn(params, batch)),
        params=jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0))),
        others={},
        batch=batch,
        names={},
    )


def resize_batch(batch: Tree, factor: int) -> Tree:
    """Return a batch of `factor` times as many examples."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * factor, *leaf.shape[1:]), leaf.dtype), batch
    )


def count_examples(batch: Tree) -> int:
    """Return the number of examples in a batch.

    Raises:
        CallerError: the batch has no examples, or its leaves disagree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    counts = {leaf.shape[0] if leaf.shape else 0 for _, leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
        raise CallerError(
            f"batch: found the shapes {shapes}, expected the same number of examples in the first dim of each"
        )
    return counts.pop()


def _scalar(result: Any) -> Any:  # noqa: ANN401 - what the user's loss returns
    loss = result[0] if isinstance(result, tuple) else result
    return loss.total if isinstance(loss, WeightedMean) else loss  # that is what has a gradient


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - an array of any library, or its shape
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if hasattr(leaf, "dtype")
        else _shape_of(jnp.asarray(leaf))
    )


def _makes_nnx(model: Callable[..., Any]) -> bool:
    if isinstance(model, type) and issubclass(model, nnx.Module):
        return True
    try:
        return "rngs" in inspect.signature(model).parameters
    # A builtin has no signature.
    except ValueError:
        return False
