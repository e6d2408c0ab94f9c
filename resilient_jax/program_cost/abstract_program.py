"""A model without its numbers: shapes, names, and the loss as a function of its parameters; no device is touched.

The models are those that `Trainer` takes: what makes an `nnx.Module`, a `flax.linen.Module`, or a function `init(key)`.
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
from resilient_jax.sharding.logical_axes import (
    LogicalNames,
    Tree,
    format_path,
    get_linen_names,
    get_nnx_names,
)

LossFn = Callable[[Any, Tree], Any]
"""Gets the model, or a plain function's tree, and a batch; gives a number, or a tuple that begins with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractProgram:
    """A loss and the shapes of what goes into it.

    Attributes:
        loss: a pure function `(params, others, batch)` to a scalar.
        params: `jax.ShapeDtypeStruct`s of what has a gradient.
        others: of statistics, constants and random streams.
        batch: of one microbatch.
        names: logical names in the model's metadata, by path in `params`.
    """

    loss_fn: Callable[[Tree, Tree, Tree], jax.Array]
    params: Tree
    others: Tree
    batch: Tree
    names: dict[str, LogicalNames]


def make_abstract_program(model: object, loss_fn: LossFn, batch: Tree) -> AbstractProgram:
    """Gives the program that computes `loss(model, batch)`.

    Args:
        model: as the trainer takes it.
        loss: of one microbatch.
        batch: arrays or `jax.ShapeDtypeStruct`s; the first dim of each is the examples'.

    Raises:
        CallerError: it is no model, has no parameters or some that have no gradient, or the loss is no scalar of a
            floating-point type.
    """
    batch = jax.tree.map(_shape_of, batch)
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
    found = jax.eval_shape(program.loss_fn, program.params, program.others, program.batch)
    if getattr(found, "shape", None) == () and not jnp.issubdtype(found.dtype, jnp.floating):
        raise CallerError(
            f"loss: found a scalar of {found.dtype}, expected one of a floating-point type: it is to have a gradient"
        )
    if getattr(found, "shape", None) != ():
        raise CallerError(f"loss: found a result {found}, expected a scalar, or a tuple that begins with one")
    return program


def _check_parameters(params: Tree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise CallerError(
            "model: found no parameters (nnx.Param, the collection params, or what init gives), expected at least one"
        )
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise CallerError(
                f"model: found the parameter {format_path(path)} of {leaf.dtype}, expected numbers that have a "
                "gradient. Keep others in nnx.Variable, in another collection, or in the batch"
            )


def _nnx_program(factory: Callable[..., Any], loss: LossFn, batch: Tree) -> AbstractProgram:
    # Variables with names would otherwise ask for a mesh that has axes of these names.
    with nnx.use_eager_sharding(False):
        net = nnx.eval_shape(lambda: factory(rngs=nnx.Rngs(0)))
    graph, params, others = nnx.split(net, nnx.Param, ...)

    def compute(params: Tree, others: Tree, batch: Tree) -> jax.Array:
        with nnx.use_eager_sharding(False):
            return _scalar(loss(nnx.merge(graph, params, others), batch))

    return AbstractProgram(
        loss_fn=compute,
        params=nnx.to_pure_dict(params),
        others=nnx.to_pure_dict(others),
        batch=batch,
        names=get_nnx_names(params),
    )


def _linen_program(module: nn.Module, loss: LossFn, batch: Tree) -> AbstractProgram:
    def init(key: jax.Array, batch: Tree) -> Tree:
        return dict(nn.init(functools.partial(_swapped, loss, batch), module)({"params": key}))

    boxed = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)), batch)
    variables = nn.unbox(boxed)

    def compute(params: Tree, others: Tree, batch: Tree) -> jax.Array:
        bound = {"params": params, **others}
        use = functools.partial(_swapped, loss, batch)
        # Of the streams of random numbers only the use matters here, not the numbers.
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


def _swapped(loss: LossFn, batch: Tree, model: nn.Module) -> Any:  # noqa: ANN401 - what the user's loss gives
    return loss(model, batch)


def _plain_program(init: Callable[..., Any], loss: LossFn, batch: Tree) -> AbstractProgram:
    return AbstractProgram(
        loss_fn=lambda params, others, batch: _scalar(loss(params, batch)),
        params=jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0))),
        others={},
        batch=batch,
        names={},
    )


def resize_batch(batch: Tree, factor: int) -> Tree:
    """Gives a batch of `factor` times the examples."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * factor, *leaf.shape[1:]), leaf.dtype), batch
    )


def count_examples(batch: Tree) -> int:
    """Gives the number of examples in a batch.

    Raises:
        CallerError: it has none, or its leaves do not agree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    counts = {leaf.shape[0] if leaf.shape else 0 for _, leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
        raise CallerError(
            f"batch: found the shapes {shapes}, expected the same number of examples first in each"
        )
    return counts.pop()


def _scalar(result: Any) -> Any:  # noqa: ANN401 - what the user's loss gives
    return result[0] if isinstance(result, tuple) else result


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
    except ValueError:  # a builtin
        return False
