"""The training state as it is handed from one generation to the next.

Between generations a state is a flat list of named leaves: no tree type, no sharding of a mesh that is
gone. The user's own `init_state` gives the tree back its shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from resilient_jax.errors import StateError

Tree = TypeVar("Tree")
ShardingRule = Sharding | Callable[[str, jax.ShapeDtypeStruct], Sharding]
"""One sharding for all leaves, or a function of a leaf's path and abstract value."""


CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where a traced function asks for numbers."""


def is_random_key(leaf: Any) -> bool:  # noqa: ANN401 - any array
    """Return whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatLeafType:
    """What a leaf is held as.

    Attributes:
        shape: of the array; of a random key's raw data.
        dtype: likewise.
        key_impl: for a random key, the name of its implementation; else None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    key_impl: str | None = None

    def make_abstract(self) -> jax.ShapeDtypeStruct:
        """As it is in the user's tree: random keys are keys there."""
        data = jax.ShapeDtypeStruct(self.shape, self.dtype)
        if self.key_impl is None:
            return data
        return jax.eval_shape(functools.partial(jax.random.wrap_key_data, impl=self.key_impl), data)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatLeaf:
    """One array of a state.

    Attributes:
        path: where it sits in the tree, as `jax.tree_util.keystr` writes it.
        value: on devices, or in host memory. A random key is held as its raw data.
        key_impl: for a random key, the name of its implementation; else None.
    """

    path: str
    value: jax.Array | np.ndarray
    key_impl: str | None = None

    @property
    def type(self) -> FlatLeafType:
        return FlatLeafType(self.value.shape, self.value.dtype, self.key_impl)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """The state after `step` committed steps.

    Attributes:
        leaves: its arrays.
        texts: its leaves that are text, by path; the same on every host.
    """

    step: int
    leaves: tuple[FlatLeaf, ...]
    strings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(leaf.value.nbytes for leaf in self.leaves)

    @property
    def is_complete(self) -> bool:
        """Whether this host has all of it, so that it can hand it on alone."""
        return all(_is_here(leaf.value) for leaf in self.leaves)


def _is_here(value: jax.Array | np.ndarray) -> bool:
    if isinstance(value, np.ndarray) or value.is_fully_addressable or value.is_fully_replicated:
        return True
    # Cut over the devices of each host, with a copy on every one.
    boxes = {tuple((cut.start, cut.stop) for cut in shard.index) for shard in value.addressable_shards}
    return len(boxes) * math.prod(value.sharding.shard_shape(value.shape)) == value.size


def flatten_state(step: int, tree: Any) -> FlatState:  # noqa: ANN401 - any pytree
    """Takes hold of a pytree of arrays and texts. The caller must not donate or change them while it is held.

    Raises:
        StateError: a leaf is no array, number or text, or was deleted (donated); names it.
    """
    paths_and_values, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = [(jax.tree_util.keystr(path), value) for path, value in paths_and_values]
    return FlatState(
        step=step,
        leaves=tuple(_leaf(path, value) for path, value in named if not isinstance(value, str)),
        strings={path: str(value) for path, value in named if isinstance(value, str)},
    )


def make_abstract_state(init: Callable[[], Tree]) -> Tree:
    """What `init` makes, with `jax.ShapeDtypeStruct` in place of its arrays; texts are as it makes them.

    Raises:
        StateError: it needs the numbers of what it makes, which are not there when it is traced.
    """
    made: list[Any] = []

    def make_arrays() -> list[Any]:
        made[:] = jax.tree_util.tree_flatten(init())
        return [None if isinstance(leaf, str) else leaf for leaf in made[0]]

    try:
        abstract = jax.eval_shape(make_arrays)
    except CONCRETIZATION_ERRORS as error:
        raise StateError(
            f"the function that makes the initial state cannot be traced ({str(error).splitlines()[0]}): expected "
            "jax.numpy where it works on JAX's arrays, and no decision that hangs on their numbers. After a failure it "
            "is traced, for the shapes. What must be computed or loaded in another way, such as pretrained weights, do "
            "before rj.run with numpy, and return it from there"
        ) from error
    leaves, structure = made
    return jax.tree_util.tree_unflatten(
        structure,
        [text if isinstance(text, str) else array for text, array in zip(leaves, abstract, strict=True)],
    )


def _leaf(path: str, value: object) -> FlatLeaf:
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise StateError(
                f"the state's leaf {path} was deleted: the array was donated to a program after it was handed "
                "over. Commit the state that the program returned"
            )
        key_impl = None
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, key_impl = jax.random.key_data(value), str(jax.random.key_impl(value))
        # JAX lists an array's parts when first asked for them, and of two threads that ask at once one may see half of
        # the list (jax 0.10.2). From here on others may ask: the thread that copies a snapshot.
        _ = value.addressable_shards
        return FlatLeaf(path=path, value=value, key_impl=key_impl)
    array = np.asarray(value)
    if array.dtype.kind in "USOMm" or array.dtype.type is np.void:
        raise StateError(
            f"the state's leaf {path} is a {type(value).__name__}; a state holds arrays, numbers and texts only. "
            "Keep other things outside of it, they are the same on every host"
        )
    if not array.dtype.isnative:  # copies are bytes, read again by the name of the type
        array = array.astype(array.dtype.newbyteorder("="))
    return FlatLeaf(path=path, value=_as_jax_has_it(path, array))


def _as_jax_has_it(path: str, array: np.ndarray) -> np.ndarray:
    """With 32 bits instead of 64 unless `jax_enable_x64` is set: so it comes back, and so every program sees it."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    narrow = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise StateError(
            f"the state's leaf {path} is {array.dtype} with numbers from {array.min()} to {array.max()}, which do not "
            f"fit {dtype}; set jax_enable_x64, or keep it outside of the state"
        )
    return narrow


def copy_to_host(state: FlatState) -> FlatState:
    """A copy in host memory that needs no device any more.

    Raises:
        StateError: a leaf is spread over several hosts, so that none can copy all of it.
    """
    return dataclasses.replace(
        state, leaves=tuple(dataclasses.replace(leaf, value=_host_copy(leaf)) for leaf in state.leaves)
    )


def _host_copy(leaf: FlatLeaf) -> np.ndarray:
    """A copy, never a view: on CPU `np.asarray` of a device array is its own memory."""
    value = leaf.value
    if isinstance(value, np.ndarray):
        return value
    if value.is_fully_addressable:
        return np.array(value)
    if value.is_fully_replicated:
        return np.array(value.addressable_data(0))
    return assemble_array(leaf.path, value)


def assemble_array(path: str, value: jax.Array) -> np.ndarray:
    """The whole array, of the parts on this host's devices.

    Raises:
        StateError: they are not all.
    """
    whole = np.empty(value.shape, value.dtype)
    covered = np.zeros(value.shape, bool)
    for shard in value.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
        covered[shard.index] = True
    if not covered.all():
        raise StateError(
            f"the state's leaf {path} is sharded over several hosts ({value.sharding}), so no single host holds "
            "all of it. States must be complete on every host: replicate the state over hosts (shard it over "
            "the devices of one host only)"
        )
    return whole


def restore_state(abstract: Tree, state: FlatState, sharding: ShardingRule | None) -> Tree:
    """The held state in the tree of `abstract`, placed for the present mesh.

    Args:
        abstract: as `describe` gives it.
        held: leaves on devices are reused without a copy wherever they already lie right.
        sharding: where each leaf goes; None: this process's first device, or where it lies already.

    Raises:
        StateError: structure, shape or dtype differ; names the first leaf that does.
    """
    by_path = {leaf.path: leaf for leaf in state.leaves}
    matched = match_state(
        abstract, {path: leaf.type for path, leaf in by_path.items()}, state.strings, sharding
    )
    return matched.build([_place(path, by_path[path].value, target) for path, target in matched.leaves])


@dataclasses.dataclass(frozen=True, slots=True)
class MatchedState(Generic[Tree]):
    """A state that fits what the init function makes, still without its values.

    Attributes:
        leaves: path and sharding of the data of each leaf that is an array, in the tree's order.
        types: what each of them is held as.
        tree: with abstract leaves; texts are those that were held.
    """

    leaves: tuple[tuple[str, Sharding | None], ...]
    types: tuple[FlatLeafType, ...]
    tree: Tree

    def build(self, arrays: Sequence[jax.Array]) -> Tree:
        """The tree with these arrays, in the order of `leaves`. The raw data of random keys becomes keys."""
        values = iter(
            array if held.key_impl is None else jax.random.wrap_key_data(array, impl=held.key_impl)
            for held, array in zip(self.types, arrays, strict=True)
        )
        return jax.tree_util.tree_map(lambda leaf: leaf if isinstance(leaf, str) else next(values), self.tree)


def match_state(
    abstract: Tree,
    held: Mapping[str, FlatLeafType],
    strings: Mapping[str, str],
    sharding: ShardingRule | None,
) -> MatchedState[Tree]:
    """Which held leaf goes where in the tree of `abstract`.

    Args:
        abstract: as `describe` gives it.
        held: what arrays are held as, by path.
        texts: that are held, by path.
        sharding: where each leaf goes; that of a key's data is the key's own.

    Raises:
        StateError: structure, shape or dtype differ; names the first leaf that does.
    """
    paths_and_wanted, structure = jax.tree_util.tree_flatten_with_path(abstract)
    all_wanted = {jax.tree_util.keystr(path): wanted for path, wanted in paths_and_wanted}
    arrays = {path: wanted for path, wanted in all_wanted.items() if not isinstance(wanted, str)}
    _check_same_paths(list(arrays), list(held))
    _check_same_paths(list(all_wanted.keys() - arrays.keys()), list(strings))
    leaves = []
    for path, wanted in arrays.items():
        found = held[path].make_abstract()
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise StateError(
                f"the state's leaf {path} is {found.dtype}{list(found.shape)} where the init function "
                f"makes {wanted.dtype}{list(wanted.shape)}; both must describe the same model"
            )
        leaves.append((path, sharding(path, wanted) if callable(sharding) else sharding))
    tree = jax.tree_util.tree_unflatten(
        structure, [strings.get(path, leaf) for path, leaf in all_wanted.items()]
    )
    return MatchedState(tuple(leaves), tuple(held[path] for path in arrays), tree)


def _check_same_paths(wanted: list[str], found: list[str]) -> None:
    missing = sorted(set(wanted) - set(found))
    unknown = sorted(set(found) - set(wanted))
    if missing or unknown:
        raise StateError(
            f"the state that was handed over does not fit the init function: missing {missing[:3] or 'nothing'}, "
            f"not expected {unknown[:3] or 'nothing'}; commit the same tree that init makes"
        )


def _place(path: str, value: jax.Array | np.ndarray, sharding: Sharding | None) -> jax.Array:
    if isinstance(value, np.ndarray):
        if sharding is None:
            sharding = SingleDeviceSharding(jax.local_devices()[0])
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    if sharding is None:
        if value.is_fully_addressable:
            return value
        raise StateError(
            f"the state's leaf {path} lies on a mesh of several hosts ({value.sharding}) that has changed; say "
            "where it shall lie now: restore_or_init(init, sharding=NamedSharding(world.mesh(...), ...))"
        )
    if value.sharding == sharding:
        return value
    return _move(path, value, sharding)


def _move(path: str, value: jax.Array, sharding: Sharding) -> jax.Array:
    """Rewraps what lies right already; what does not goes through host memory."""
    held = {shard.device: (shard.index, shard.data) for shard in value.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(value.shape)
    if all(device in held and _same(held[device][0], index, value.shape) for device, index in wanted.items()):
        return jax.make_array_from_single_device_arrays(
            value.shape, sharding, [held[device][1] for device in wanted]
        )
    whole = _host_copy(FlatLeaf(path=path, value=value))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: whole[index])


def _same(one: tuple[slice, ...], other: tuple[slice, ...] | None, shape: tuple[int, ...]) -> bool:
    if other is None:
        return False
    return all(a.indices(n) == b.indices(n) for a, b, n in zip(one, other, shape, strict=True))


def place_initial_state(tree: Tree, sharding: ShardingRule | None) -> Tree:
    """A state that was just made by the init function, placed like a restored one.

    Also committed like one: a program compiled for arrays that may lie anywhere is compiled again for arrays
    that lie there, and that would be in the stall after the first failure.
    """
    abstract = make_abstract_state(lambda: tree)
    return restore_state(abstract, copy_to_host(flatten_state(0, tree)), sharding)
