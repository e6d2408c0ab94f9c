"""Marks in the trace of a loss where a layer begins and where it ends; the model itself is not changed.

A mark is `jax.ad_checkpoint.checkpoint_name` of the arrays that go into a layer, or come out of it: an identity.
Which modules are layers follows from the paths of their parameters, as for the planner (`sharding.layer_stacks`): the
largest family of numbered paths with equal parameters, `layers/0/...` or `Block_0/...`.

- NNX: `mark_layers(net)`, inside the loss, gives each layer a subclass of its class whose `__call__` marks.
- Linen: `intercept_linen_layers(shapes)` around the trace marks the calls of modules with these paths.
- Anything else: the loss calls `mark_layer(layer, ...)` itself.

Layers that are stacked and scanned need no mark (`loss_trace`).
"""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from resilient_jax.sharding.layer_stacks import find_layer_positions
from resilient_jax.sharding.logical_axes import format_path

_Result = TypeVar("_Result")
_Net = TypeVar("_Net", bound=nnx.Module)
INPUT: Final = "resilient_jax layer input "
OUTPUT: Final = "resilient_jax layer output "
_LINEN_PARAMS: Final = "params/"
_numbers = itertools.count()


class LayerMark(NamedTuple):
    """What an equation marks.

    Attributes:
        is_input: True: a layer begins; False: a layer ends.
        call: number of the layer's call, unique in the process.
    """

    is_input: bool
    call: int


def read_mark(equation: core.JaxprEqn) -> LayerMark | None:
    """Return the mark that an equation is; None: it is none."""
    if equation.primitive.name != "name":
        return None
    text = equation.params["name"]
    for prefix in (INPUT, OUTPUT):
        if text.startswith(prefix):
            return LayerMark(prefix == INPUT, int(text.removeprefix(prefix)))
    return None


def mark_layer(layer: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result:  # noqa: ANN401 - any layer's
    """Call a layer, with marks on the arrays that go in and come out."""
    call = next(_numbers)
    args, kwargs = _mark((args, kwargs), f"{INPUT}{call}")
    return _mark(layer(*args, **kwargs), f"{OUTPUT}{call}")


def mark_layers(net: _Net) -> _Net:
    """Return an NNX model whose layers mark their calls; without numbered layers, as it is.

    The instances get another class. So give it a model that is made in the trace, as `nnx.merge` does.
    """
    params = nnx.to_flat_state(nnx.state(net, nnx.Param))
    shapes = {_join(path): tuple(variable.get_value().shape) for path, variable in params}
    layers = find_layer_paths(shapes)
    for path, module in nnx.iter_modules(net):
        if _join(path) in layers and not hasattr(type(module), "is_marked_layer"):
            object.__setattr__(module, "__class__", _make_marked_class(type(module)))
    return net


@contextlib.contextmanager
def intercept_linen_layers(variables: Any) -> Iterator[None]:  # noqa: ANN401 - a tree
    """Mark the calls of a Linen model's layers while it is traced.

    Args:
        variables: arrays or shapes, in the tree of the model's variables or of its parameters.
    """
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    paths = find_layer_paths({format_path(path): tuple(leaf.shape) for path, leaf in leaves})
    layers = {
        path[path.find(_LINEN_PARAMS) + len(_LINEN_PARAMS) :] if _LINEN_PARAMS in path else path
        for path in paths
    }

    def intercept(
        next_call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:  # noqa: ANN401 - of any layer
        if context.method_name != "__call__" or "/".join(context.module.path) not in layers:
            return next_call(*args, **kwargs)
        return mark_layer(next_call, *args, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def find_layer_paths(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Return the paths of the layers among parameters of these paths and shapes: `{"layers/0", "layers/1"}`."""
    found = set()
    for path, position in find_layer_positions(shapes, {}).items():
        if position.layer is not None:
            depth = next(depth for depth, part in enumerate(position.path.split("/")) if "*" in part)
            found.add("/".join(path.split("/")[: depth + 1]))
    return frozenset(found)


@functools.cache
def _make_marked_class(plain: type[nnx.Module]) -> type[nnx.Module]:
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any layer
        return mark_layer(functools.partial(plain.__call__, self), *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue] - a layer is callable

    body = {"__call__": call, "is_marked_layer": True, "__module__": plain.__module__}
    return types.new_class(plain.__name__, (plain,), exec_body=lambda namespace: namespace.update(body))


def _mark(tree: Any, text: str) -> Any:  # noqa: ANN401 - arguments or results of a layer
    return jax.tree.map(
        lambda leaf: checkpoint_name(leaf, text) if is_number_array(leaf) else leaf,
        tree,
        # Modules are pytrees, and would be copied.
        is_leaf=lambda leaf: isinstance(leaf, nnx.Pytree | nnx.Variable),
    )


def is_number_array(value: object) -> bool:
    """Return whether a value is an array that can be marked: no random key."""
    return isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
