"""One small interface to what Flax NNX, Flax Linen and plain functions call a model.

The variables of a model are three trees. What `use(model)` does with the bound model is up to the caller, which calls
the user's loss. All functions are pure and traced; no array, device or mesh is kept.
"""

import abc
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError

Tree = Any
"""A pytree of arrays."""
Predicate = Callable[[tuple[Any, ...], Any], bool]
"""Returns whether the parameter of a path, and a value, is trained."""
EXPECTED_FILTER: Final = (
    'a filter of nnx, such as nnx.All(nnx.Param, nnx.PathContains("head")), or a function of a path and a value: '
    'wrt=lambda path, value: "head" in path'
)
UseModel = Callable[[Any], Any]
"""Called with the model that is bound to its variables."""

BATCH_STATS: Final = "batch_stats"
"""Linen's collection of statistics over the examples of a batch."""
NNX_BATCH_STATS: Final = "BatchStat"
"""The type of the same in NNX, and of its subclasses."""
PARAMS: Final = "params"
"""Linen's collection of parameters; of a model that is frozen in part, the frozen ones."""
NNX_PARAMS: Final = "Param"
"""The type of the same in NNX, and of its subclasses."""
NOT_RETURNED: Final = (PARAMS, "intermediates")
"""Linen collections that a loss function does not change: `sow` into the second does nothing, as in `Module.apply`."""


class Variables(NamedTuple):
    """The variables of a model.

    Attributes:
        params: parameters that the optimizer updates.
        collections: all other variables, by the name of their Linen collection or NNX type; frozen parameters too.
    """

    params: Tree
    collections: dict[str, Tree]

    @property
    def frozen(self) -> Tree:
        """The parameters that are not trained; {} without."""
        return self.collections.get(PARAMS, self.collections.get(NNX_PARAMS, {}))

    @property
    def batch_stats(self) -> Tree:
        """Statistics over the examples of a batch, as of batch normalization; {} without."""
        return self.collections.get(BATCH_STATS, self.collections.get(NNX_BATCH_STATS, {}))


class ModelAdapter(abc.ABC):
    """A model without its variables."""

    @abc.abstractmethod
    def init(self, key: jax.Array, use: UseModel) -> Variables:
        """Return the initial variables, a pure function of the key. `use` shows what the model is called with."""

    @abc.abstractmethod
    def apply(
        self, variables: Variables, key: jax.Array, use: UseModel, *, training: bool
    ) -> tuple[Any, Variables]:
        """Return the result of `use(model)`, and the variables after it, which may be more than before.

        Args:
            key: key of all random numbers that the model draws.
            use: function that is called with the bound model.
            training: False: the model is in evaluation mode, if the model has one.
        """

    @abc.abstractmethod
    def make_model(self, variables: Variables) -> Any:  # noqa: ANN401 - an nnx.Module or a tree
        """Return the user's kind of a model with these variables, outside of a program.

        Args:
            variables: variables as `init` makes them, as numpy arrays; of a random key its raw data.
        """


def adapt_model(model: object, wrt: Any = nnx.Param) -> ModelAdapter:  # noqa: ANN401 - whatever nnx takes for a filter
    """Return the adapter of the user's model.

    Args:
        wrt: selects the parameters that are trained, as that of `nnx.Optimizer`; `nnx.Param`: all parameters of any
            model.
        model: a function or class that makes an `nnx.Module` and has a parameter `rngs`; a `flax.linen.Module`; or a
            function `init(key)` that makes a tree of arrays.

    Raises:
        CallerError: `model` is none of these, or an `nnx.Module` with its arrays already made; `wrt` is no filter.
    """
    try:
        trained = None if wrt is nnx.Param else nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:
        raise CallerError(f"wrt: found {describe_value(wrt)}, expected {EXPECTED_FILTER}") from error
    if isinstance(model, nnx.Module):
        name = type(model).__name__
        raise CallerError(
            f"model: found an instance of the nnx.Module {name}, expected a function that makes one. Its arrays are on "
            "devices, which are lost and replaced with their hosts; the trainer makes the model once the devices are "
            f"connected. Write model=lambda rngs: {name}(..., rngs=rngs)"
        )
    if isinstance(model, nn.Module):
        return LinenAdapter(model, trained)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CallerError(
            f"model: found the class {model.__name__} itself, expected an instance of this flax.linen.Module. Write "
            f"model={model.__name__}(...)"
        )
    if callable(model):
        is_class = isinstance(model, type) and issubclass(model, nnx.Module)
        if is_class or "rngs" in _parameter_names(model):
            _check_call(model, "rngs")
            return NnxAdapter(model, trained)
        _check_call(model)
        return FunctionAdapter(model, trained)
    raise CallerError(
        f"model: found {describe_value(model)}, expected a function lambda rngs: Net(..., rngs=rngs) that makes an "
        "nnx.Module, a flax.linen.Module, or a function init(key) that makes a tree of arrays"
    )


def _check_call(function: Callable[..., Any], *names: str) -> None:
    """Check that the function can be called with these arguments by name; without names, with a key.

    Raises:
        CallerError: the function cannot be called so.
    """
    # The metaclass of nnx hides the parameters of a class.
    called = functools.partial(function.__init__, None) if isinstance(function, type) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a builtin that has none
        return
    try:
        signature.bind(*(() if names else (None,)), **dict.fromkeys(names))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise CallerError(
            f"model: found {name}{signature}, expected a function of one argument: lambda rngs: Net(..., rngs=rngs), "
            "which makes an nnx.Module, or init(key), which makes a tree of arrays. Bind the others in a lambda"
        ) from error


class NnxAdapter(ModelAdapter):
    """An `nnx.Module`, made in every trace by its factory.

    Its random streams (`nnx.RngState`) are not part of the state: every microbatch gets new ones, from its key.
    """

    def __init__(self, factory: Callable[..., object], trained: Predicate | None = None) -> None:
        self._factory = factory
        self._trained = trained or nnx.filterlib.to_predicate(nnx.Param)

    def init(self, key: jax.Array, use: UseModel) -> Variables:
        """Return the variables that the factory draws from `nnx.Rngs(key)`."""
        _, _, variables = self._split(self._make(key))
        _check_trained(variables)
        return variables

    def apply(
        self, variables: Variables, key: jax.Array, use: UseModel, *, training: bool
    ) -> tuple[Any, Variables]:
        """See `ModelAdapter`. In training the module keeps the mode in which the factory left it."""
        graph, streams, _ = self._abstract_split
        net = nnx.merge(graph, variables.params, _rekey(streams, key), *variables.collections.values())
        if not training:
            net.eval()
        out = use(net)
        return out, self._split(net)[2]

    def make_model(self, variables: Variables) -> nnx.Module:
        """Return the module on the first device; its random streams begin at key 0."""
        graph, streams, abstract = self._abstract_split
        params, collections = jax.tree.map(_place, abstract, variables)
        return nnx.merge(graph, params, _rekey(streams, jax.random.key(0)), *collections.values())

    @functools.cached_property
    def _abstract_split(self) -> tuple[Any, Tree, Variables]:
        """The module's graph and abstract values, hashable and without arrays; made without a device."""
        # Logical axis names are for the planner; Flax would look for axes with such names in the mesh of the trace.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return self._split(nnx.eval_shape(lambda: self._make(jax.random.key(0))))

    def _split(self, net: nnx.Module) -> tuple[Any, Tree, Variables]:
        """Return graph, random streams and variables; trees of plain dicts."""
        graph, params, streams, others = nnx.split(net, self._trained, nnx.RngState, ...)
        flat: dict[str, dict[Any, Any]] = {}
        for path, variable in nnx.to_flat_state(others):
            flat.setdefault(_name_type(variable.type), {})[path] = variable
        collections = {name: nnx.to_pure_dict(nnx.from_flat_state(flat[name])) for name in sorted(flat)}
        return graph, nnx.to_pure_dict(streams), Variables(nnx.to_pure_dict(params), collections)

    def _make(self, key: jax.Array) -> nnx.Module:
        # Logical axis names are for the planner; Flax would need a mesh at once for each array that has some.
        with nnx.use_eager_sharding(False):
            net = self._factory(rngs=nnx.Rngs(key))
        if not isinstance(net, nnx.Module):
            raise CallerError(
                f"model: found a function of `rngs` that makes a {type(net).__name__}, expected an nnx.Module"
            )
        return net


def _name_type(variable_type: type) -> str:
    """Return the name of a collection of NNX variables: that of their type, or of its base class in Flax."""
    if issubclass(variable_type, nnx.Param):
        return NNX_PARAMS
    return NNX_BATCH_STATS if issubclass(variable_type, nnx.BatchStat) else variable_type.__name__


def _freeze(params: Tree, collections: dict[str, Tree], trained: Predicate | None) -> Variables:
    """Return the variables with the parameters that are not trained as a collection."""
    if trained is None:
        return Variables(params, collections)
    if not isinstance(params, dict):
        raise CallerError(
            f"wrt: found a model that is a {type(params).__name__}, expected nested dicts of arrays"
        )
    flat = traverse_util.flatten_dict(params)
    kept = {path: leaf for path, leaf in flat.items() if trained(path, leaf)}
    frozen = {path: leaf for path, leaf in flat.items() if path not in kept}
    variables = Variables(
        traverse_util.unflatten_dict(kept), {**collections, PARAMS: traverse_util.unflatten_dict(frozen)}
    )
    _check_trained(variables)
    return variables


def _join_parameters(variables: Variables) -> Tree:
    """Return trained and frozen parameters as one tree."""
    if PARAMS not in variables.collections:
        return variables.params
    parts = (variables.params, variables.collections[PARAMS])
    return traverse_util.unflatten_dict(
        {path: leaf for part in parts for path, leaf in traverse_util.flatten_dict(part).items()}
    )


def _check_trained(variables: Variables) -> None:
    """Check that something is trained, and that it has gradients.

    Raises:
        CallerError: nothing is trained, or a parameter has no gradient; the message names the parameters that there
            are.
    """
    found = jax.tree_util.tree_leaves_with_path(variables.params)
    if not found:
        others = {name: variables.collections.get(name, {}) for name in (PARAMS, NNX_PARAMS)}
        names = [jax.tree_util.keystr(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(others)]
        raise CallerError(
            f"wrt: found that it selects none of the model's parameters ({', '.join(names[:8])}, ...), expected "
            f"{EXPECTED_FILTER}"
        )
    for path, leaf in found:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise CallerError(
                f"wrt: found that it selects {jax.tree_util.keystr(path)} of dtype {leaf.dtype}, expected "
                f"floating-point parameters: {EXPECTED_FILTER}"
            )


def _place(like: Any, leaf: np.ndarray) -> jax.Array:  # noqa: ANN401 - abstract
    """Return an array on the first device; raw data of a random key becomes a key."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(leaf), impl=jax.random.key_impl(jnp.zeros((), like.dtype))
        )
    return jnp.asarray(leaf)


def _rekey(streams: Tree, key: jax.Array) -> Tree:
    """Return every random stream at its beginning, with a key of its own."""
    leaves, treedef = jax.tree.flatten(streams)
    fresh = [
        jax.random.split(jax.random.fold_in(key, number), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, fresh)


class LinenAdapter(ModelAdapter):
    """A `flax.linen.Module`, bound while it is used. All its random streams are drawn from the one key."""

    def __init__(self, module: nn.Module, trained: Predicate | None = None) -> None:
        self._module = module
        self._trained = trained

    def init(self, key: jax.Array, use: UseModel) -> Variables:
        """Return the variables that the module makes when `use` calls it."""
        made = dict(nn.init(use, self._module)({"params": key}))
        return _freeze(made.pop(PARAMS, {}), made, self._trained)

    def apply(
        self, variables: Variables, key: jax.Array, use: UseModel, *, training: bool
    ) -> tuple[Any, Variables]:
        """See `ModelAdapter`. Linen has no mode: the loss passes `train=` to its modules, or does not."""
        bound = self.make_model(variables)
        # Linen draws from the stream "params" wherever one of another name is missing.
        out, after = nn.apply(use, self._module, mutable=nn.DenyList(NOT_RETURNED))(
            bound, rngs={"params": key}
        )
        return out, Variables(variables.params, dict(after))

    def make_model(self, variables: Variables) -> Tree:
        """Return the variables, as `module.apply` takes them."""
        return {**variables.collections, PARAMS: _join_parameters(variables)}


class FunctionAdapter(ModelAdapter):
    """A tree of arrays, all of them parameters."""

    def __init__(self, make: Callable[[jax.Array], Tree], trained: Predicate | None = None) -> None:
        self._make = make
        self._trained = trained

    def init(self, key: jax.Array, use: UseModel) -> Variables:
        """Return the function's tree.

        Raises:
            CallerError: a leaf is no array.
        """
        params = self._make(key)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not hasattr(leaf, "dtype"):
                raise CallerError(
                    f"model: found a {type(leaf).__name__} at init(key){jax.tree_util.keystr(path)}, expected a tree "
                    "of arrays. A function that makes an nnx.Module must call its parameter `rngs`; of a "
                    "flax.linen.Module give an instance"
                )
        return _freeze(params, {}, self._trained)

    def apply(
        self, variables: Variables, key: jax.Array, use: UseModel, *, training: bool
    ) -> tuple[Any, Variables]:
        """See `ModelAdapter`; the bound model is the tree."""
        return use(self.make_model(variables)), variables

    def make_model(self, variables: Variables) -> Tree:
        """Return the function's tree, with trained and frozen parameters in their places."""
        return _join_parameters(variables)


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # a builtin
        return ()
