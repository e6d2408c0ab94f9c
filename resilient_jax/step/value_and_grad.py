"""`World.value_and_grad`: the mean loss and gradient of a step's microbatches, as `jax.value_and_grad` gives one's.

One program computes a microbatch's loss, gradient and auxiliary output, in float32 or wider, on the mesh of a replica;
a second one divides the sums. Both are kept for the process by the loss function, and neither depends on which hosts
are alive.

A loss that is a scalar is summed as a `WeightedMean` of weight one: so a host knows what is summed before it has traced
the loss, and the step's weight is the number of microbatches.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.argument_checks import describe_value
from resilient_jax.data.function_data import FunctionData
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart
from resilient_jax.data.microbatches import MicrobatchData, make_microbatch_data
from resilient_jax.errors import CallerError
from resilient_jax.sharding.placements import make_zero
from resilient_jax.step.batch_source import BatchSource
from resilient_jax.step.loss_gradient import differentiate_loss
from resilient_jax.step.microbatch_accumulator import ComputeFunction
from resilient_jax.step.microbatch_program import MicrobatchProgram
from resilient_jax.step.random_keys import (
    KEY_NAMES,
    call_with_key,
    find_key_name,
    make_microbatch_id,
    make_microbatch_key,
)
from resilient_jax.step.replicas import is_on_replicas
from resilient_jax.weighted_mean import WeightedMean, find_divisor, is_weighted, read_weighted_mean

Tree = Any
"""A pytree of arrays."""
MAX_PROGRAMS: Final = 32
"""Loss functions whose programs are kept: a script has a few; one that makes a new function in each step drops old."""
EXPECTED_LOSS: Final = (
    "expected loss_fn(params, batch, *args), which returns the mean over the batch, or an rj.WeightedMean, where args "
    f"are what follows params in the call; a parameter for random numbers may be called {', '.join(KEY_NAMES)}"
)


class DirectReader:
    """A `BatchSource` that reads each microbatch when it is asked for."""

    def __init__(self, data: MicrobatchData) -> None:
        self._data = data

    def expect(self, wanted: object) -> None:
        """Do nothing: nothing is read ahead."""

    def get(self, step: int, index: int, data_shard: RowPart) -> Tree:
        """Return this host's rows of a microbatch."""
        return self._data.batch(step, index, data_shard)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return the lengths of the documents in a microbatch, if they are known."""
        return self._data.lengths(step, index)


def open_batches(data: object) -> BatchSource:
    """Return the source of microbatches for what a user gives as data.

    Raises:
        CallerError: the data are no function of (step, index), no `MicrobatchData` and no `Prefetcher`.
    """
    if isinstance(data, type) or data is None:
        found = describe_value(data)
    elif all(callable(getattr(data, name, None)) for name in ("expect", "get", "lengths")):
        return data  # pyright: ignore[reportReturnType] - these methods are the protocol
    elif callable(getattr(data, "batch", None)) and callable(getattr(data, "lengths", None)):
        return DirectReader(data)  # pyright: ignore[reportArgumentType] - as above
    elif callable(data):
        checked = make_microbatch_data(data, num_microbatches=1, microbatch_size=None)
        assert isinstance(checked, FunctionData), "any other source is no function"
        return DirectReader(checked)
    else:
        found = describe_value(data)
    raise CallerError(
        f"data: found {found}, expected a function batch(step, index) that returns one microbatch, "
        "or what rj.data.make_microbatch_data makes of arrays, examples or a Grain dataset, or an rj.data.Prefetcher "
        "of it"
    )


def check_loss_function(loss_fn: object) -> None:
    """Refuse what is no function, or cannot be kept with its programs.

    Raises:
        CallerError: the loss function is not callable, or not hashable.
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise CallerError(f"loss_fn: found {describe_value(loss_fn)}, {EXPECTED_LOSS}")
    try:
        hash(loss_fn)
    except TypeError as error:
        raise CallerError(
            f"loss_fn: found {describe_value(loss_fn)} without a hash, {EXPECTED_LOSS}"
        ) from error


class ValueAndGrad:
    """A function like `jax.value_and_grad(loss_fn)`, of the mean over all microbatches of the current step.

    Args:
        loss_fn: `loss_fn(params, batch, *args)`, with a parameter of `KEY_NAMES` for random numbers if it likes.
        batches: where microbatches come from.
        accumulate: `accumulate(compute, zeros)` returns the sum over all microbatches of the step.
        num_microbatches: the number in each step.
        has_aux: as for `jax.value_and_grad`.
        seed: what all keys of random numbers are made of, with step and index.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        batches: BatchSource,
        accumulate: Callable[[ComputeFunction[Tree], Tree], Tree],
        *,
        num_microbatches: int,
        has_aux: bool,
        seed: int,
    ) -> None:
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._batches, self._accumulate = batches, accumulate
        self._num_microbatches, self._seed = num_microbatches, seed
        self._example: Tree | None = None
        """The shapes of a microbatch, once they are needed."""

    def __call__(self, params: Tree, *args: Tree) -> Any:  # noqa: ANN401 - as jax.value_and_grad
        """Return `(loss, gradients)`, or `((loss, aux), gradients)`; means over the microbatches of the step.

        Args:
            params: what the gradient is taken of: arrays of this host, JAX's or NumPy's, or on
                `World.mesh(replica_shape)`. Gradients have their tree, dtypes and sharding.
            args: what else the loss function takes: pytrees of arrays of this host.

        Raises:
            CallerError: as `World.accumulate_microbatches`; or the parameters are no arrays of this host; or the loss
                function cannot be called with these arguments, or returns something else.
        """
        # A state may have NumPy arrays, and comes back with them.
        params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, params
        )
        _check_params(params)
        key_name = find_key_name(self._loss_fn, 2 + len(args), EXPECTED_LOSS)
        programs = _make_programs(self._loss_fn, key_name, self._has_aux)
        like = self._compute_shapes(programs, params, args), params
        sharding = _choose_loss_sharding(params)
        zeros = (
            jax.tree.map(lambda leaf: _make_zeros(leaf, sharding), like[0]),
            jax.tree.map(lambda leaf: _make_zeros(leaf, leaf.sharding), params),
        )
        specs = tuple(leaf.sharding.spec if is_on_replicas(leaf) else P() for leaf in jax.tree.leaves(params))
        compute = MicrobatchProgram(
            program=programs.compute,
            shared=(params, args),
            make_ids=lambda step, index: (make_microbatch_id(step, index), np.uint32(self._seed)),
            describe_example=self._describe_example,
            choose_options=lambda mesh: {"mesh": mesh, "specs": specs},
        )
        sums = self._accumulate(compute, zeros)
        dtypes = tuple(
            leaf.dtype for leaf in jax.tree.leaves(jax.tree.map(_get_mean, like, is_leaf=is_weighted))
        )
        # The count is an argument: another number of microbatches compiles nothing.
        count = np.float32(self._num_microbatches)
        if any(map(is_on_replicas, jax.tree.leaves(params))):
            value, gradients = self._divide_on_replicas(programs, sums, count, dtypes, params)
        else:
            value, gradients = programs.mean(sums, count, dtypes=dtypes)
        return (value if self._has_aux else value[0]), gradients

    @staticmethod
    def _divide_on_replicas(
        programs: "_Programs", sums: Tree, count: np.float32, dtypes: tuple[Any, ...], params: Tree
    ) -> Tree:
        """Return the means where gradients are on several hosts: loss and `aux` are on each, also if left over."""
        values, gradients = sums
        num_values = len(dtypes) - len(jax.tree.leaves(params))
        value, divisor = programs.mean_value(values, count, dtypes=dtypes[:num_values])
        if jax.tree.leaves(gradients)[0].addressable_shards:
            return value, programs.divide(gradients, np.asarray(divisor), dtypes=dtypes[num_values:])
        absent = [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)
            for leaf in jax.tree.leaves(params)
        ]
        return value, jax.tree.structure(params).unflatten(absent)

    def _compute_shapes(
        self, programs: "_Programs", params: Tree, args: tuple[Tree, ...]
    ) -> tuple[Tree, Tree]:
        """Return the shapes of (loss, aux), as `_Programs.compute` gives them; `aux` is () without."""
        loss = WeightedMean(*[jax.ShapeDtypeStruct((), jnp.float32)] * 2)
        if not self._has_aux:
            return loss, ()
        # Only the loss function says which auxiliary output it has: it is traced with the shapes of a microbatch.
        example = self._describe_example()
        (_, aux), _ = jax.eval_shape(programs.differentiate, params, args, example, jax.random.key(0))
        return loss, aux

    def _describe_example(self) -> Tree:
        """Return the shapes of a microbatch. It is read, once in a generation: the same one on all hosts."""
        if self._example is None:
            batch = self._batches.get(0, 0, ALL_ROWS)
            self._example = jax.eval_shape(lambda: batch)
        return self._example


class _Programs:
    """The two programs of a loss function."""

    def __init__(self, loss_fn: Callable[..., Any], key_name: str | None, has_aux: bool) -> None:
        self._loss_fn, self._key_name, self._has_aux = loss_fn, key_name, has_aux
        self._has_weight: bool | None = None
        """Whether the loss is a `WeightedMean`; None: it was not traced yet."""
        self.compute = jax.jit(self._compute, static_argnames=("mesh", "specs"))
        self.mean = jax.jit(self._mean, static_argnames="dtypes")
        self.mean_value = jax.jit(self._mean_value, static_argnames="dtypes")
        self.divide = jax.jit(self._divide, static_argnames="dtypes")
        # Jitted, so that its result's shapes, which are asked for in every step, are traced once.
        self.differentiate = jax.jit(self._differentiate)

    def _differentiate(self, params: Tree, args: tuple[Tree, ...], batch: Tree, key: jax.Array) -> Tree:
        """Return ((loss, aux), gradients) of one microbatch: a `WeightedMean`; `aux` is () without."""

        def loss_of(params: Tree) -> tuple[WeightedMean, Tree]:
            result = call_with_key(self._loss_fn, self._key_name, key, params, batch, *args)
            loss, aux = _check_result(result, self._has_aux)
            self._note_kind(loss)
            return (loss if isinstance(loss, WeightedMean) else WeightedMean(loss, jnp.float32(1))), aux

        return differentiate_loss(loss_of, params)

    def _note_kind(self, loss: jax.Array | WeightedMean) -> None:
        """Refuse a loss that is a scalar in one trace, and a `WeightedMean` in another: their weights differ."""
        has_weight = isinstance(loss, WeightedMean)
        if self._has_weight not in (None, has_weight):
            found, before = ("a WeightedMean", "a scalar") if has_weight else ("a scalar", "a WeightedMean")
            raise CallerError(
                f"loss_fn: found {found}, where it returned {before} before; expected the same in each microbatch of "
                "each step"
            )
        self._has_weight = has_weight

    def _compute(
        self,
        params: Tree,
        args: tuple[Tree, ...],
        batch: Tree,
        microbatch_id: jax.Array,
        seed: jax.Array,
        *,
        mesh: AbstractMesh,
        specs: tuple[P, ...],
    ) -> Tree:
        result = self._differentiate(params, args, batch, make_microbatch_key(seed, microbatch_id))
        wide = jax.tree.map(lambda leaf: leaf.astype(_widen(leaf.dtype)), result)
        # Without the constraint the compiler may shard results as batches are sharded.
        value, gradients = jax.lax.with_sharding_constraint(wide, self._list_shardings(wide, mesh, specs))
        return value, gradients

    @staticmethod
    def _list_shardings(result: Tree, mesh: AbstractMesh, specs: tuple[P, ...]) -> Tree:
        """Return how a result is sharded: gradients as their parameters, the rest not at all."""
        value, gradients = result
        where = [NamedSharding(mesh, spec) for spec in specs]
        return jax.tree.map(lambda _: NamedSharding(mesh, P()), value), jax.tree.structure(
            gradients
        ).unflatten(where)

    @classmethod
    def _mean(cls, sums: Tree, count: jax.Array, *, dtypes: tuple[Any, ...]) -> Tree:
        values, gradients = sums
        num_values = len(dtypes) - len(jax.tree.leaves(gradients))
        value, divisor = cls._mean_value(values, count, dtypes=dtypes[:num_values])
        return value, cls._divide(gradients, divisor, dtypes=dtypes[num_values:])

    @staticmethod
    def _mean_value(values: Tree, count: jax.Array, *, dtypes: tuple[Any, ...]) -> Tree:
        """Return ((loss, aux), divisor of the gradients)."""
        loss, aux = values
        aux = jax.tree.map(
            lambda summed: summed.mean if is_weighted(summed) else summed / count, aux, is_leaf=is_weighted
        )
        divisor = find_divisor(loss.weight)
        return _cast((loss.total / divisor, aux), dtypes), divisor

    @staticmethod
    def _divide(gradients: Tree, divisor: jax.Array, *, dtypes: tuple[Any, ...]) -> Tree:
        return _cast(jax.tree.map(lambda summed: summed / divisor, gradients), dtypes)


def _cast(means: Tree, dtypes: tuple[Any, ...]) -> Tree:
    leaves, tree = jax.tree.flatten(means)
    return tree.unflatten(
        # The mean of integers is none: it stays a float.
        mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean
        for mean, dtype in zip(leaves, dtypes, strict=True)
    )


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _make_programs(loss_fn: Callable[..., Any], key_name: str | None, has_aux: bool) -> _Programs:
    return _Programs(loss_fn, key_name, has_aux)


def _check_params(params: Tree) -> None:
    if isinstance(params, nnx.Module):
        raise CallerError(
            f"value_and_grad: found the model {type(params).__name__}, expected its parameters: "
            "graphdef, params, rest = nnx.split(model, nnx.Param, ...), and nnx.merge(graphdef, params, rest) in the "
            "loss function; or let rj.Trainer train the model"
        )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise CallerError(
            f"value_and_grad: found no array in params ({describe_value(params)}), expected some"
        )
    for path, leaf in leaves:
        if not isinstance(leaf, jax.Array) or not (leaf.is_fully_addressable or is_on_replicas(leaf)):
            found = (
                f"an array on several hosts ({leaf.sharding})"
                if isinstance(leaf, jax.Array)
                else describe_value(leaf)
            )
            raise CallerError(
                f"value_and_grad: found {found} at params{jax.tree_util.keystr(path)}, expected an array on this "
                "host's devices: make it one in the function that makes the state, by jnp.asarray. One that is sharded "
                "over hosts is to be on world.mesh(replica_shape)"
            )


def _check_result(result: Any, has_aux: bool) -> tuple[jax.Array | WeightedMean, Tree]:  # noqa: ANN401 - the result of a user's function
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair != has_aux:
        remedy = (
            "give has_aux=True; a sum and its weight are rj.WeightedMean(total, weight)"
            if is_pair
            else "return (loss, aux), or leave has_aux out"
        )
        raise CallerError(
            f"loss_fn: found {'a pair' if is_pair else describe_value(result)} as its result, with has_aux={has_aux}: "
            f"{remedy}"
        )
    loss, aux = result if has_aux else (result, ())
    aux = jax.tree_util.tree_map_with_path(_read_aux, aux, is_leaf=is_weighted)
    if isinstance(loss, WeightedMean):
        return read_weighted_mean(loss, "loss_fn"), aux
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise CallerError(
            f"loss_fn: found a loss of shape {loss.shape} and dtype {loss.dtype}, expected one floating-point number: "
            "return the mean over the batch, jnp.mean(...), or of some of its rows or tokens rj.WeightedMean(total, "
            "weight)"
        )
    return loss, aux


def _read_aux(path: tuple[Any, ...], value: Any) -> jax.Array | WeightedMean:  # noqa: ANN401 - a user's
    if isinstance(value, WeightedMean):
        return read_weighted_mean(value, f"loss_fn: aux{jax.tree_util.keystr(path)}")
    return jnp.asarray(value)


def _get_mean(leaf: Any) -> Any:  # noqa: ANN401 - an array or its shape, or a `WeightedMean`
    """Return what has the dtype of a mean."""
    return leaf.total if isinstance(leaf, WeightedMean) else leaf


def _choose_loss_sharding(params: Tree) -> Sharding:
    """Return where the loss goes: replicated over the devices of the first parameter, or on one of this host."""
    first = jax.tree.leaves(params)[0]
    where = first.sharding
    if not first.is_fully_addressable:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(where.mesh, P()) if isinstance(where, NamedSharding) else where


def _make_zeros(leaf: Any, sharding: Sharding) -> jax.Array:  # noqa: ANN401 - an array or its shape
    return make_zero(jax.ShapeDtypeStruct(leaf.shape, _widen(leaf.dtype)), sharding)


def _widen(dtype: Any) -> Any:  # noqa: ANN401 - whatever JAX takes for one
    """Return the dtype in which a dtype is summed: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)
