"""The kinds of leaves that a state may have, as one table: how each is kept, and how it is given back.

"Kept" means in a commit, in the memory of a peer, in a snapshot and in a checkpoint. All of them have arrays alone:

    leaf ->  `keep_leaf`  -> array, `LeafKind`, key implementation  ->  `give_back`  -> leaf of the same kind and dtype

The rules are the same on all ways back:

- *A leaf comes back as it was committed.* Its kind travels with it (`LeafSpec.kind`), so a step after a failure has the
  same types, and thereby the same programs and bits, as the same step without one. What `init` makes is returned as
  `init` made it. A checkpoint's files do not name kinds: there the kinds are those that `init` makes.
- *Weak types stay.* A weakly typed array adapts to what it is combined with: times bfloat16 it gives bfloat16, where a
  strongly typed float32 gives float32. The rejected alternative is to make it strong before step 0. That changes
  the script's own types, and it does not help: the step may well return a weakly typed array again, such as
  `jnp.where(ok, 1.0, 0.5)` or `TrainState.step`, which would become strong by the first failure.
- *Python numbers stay Python numbers*, of 64 bits: a program takes them as weakly typed arguments, and `if`, `range`
  and f-strings take them as they are.
- *NumPy stays NumPy, with its width.* 64-bit values are kept in host memory, where they need no `jax_enable_x64`. NumPy
  arrays are copied by each commit, as a script may write to them in place.
- *With a sharding* an initial leaf is placed as `jax.device_put` would: NumPy becomes a strongly typed array, a Python
  number a weakly typed one (bool has no weak type). 64-bit NumPy leaves are refused there: they would lose half of
  their bits.

Everything else is refused at `init`, or at the first commit that has it, by its path.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax._src.lax import lax as private_lax

from resilient_jax.errors import StateError
from resilient_jax.protocol.leaf_spec import LeafKind, LeafSpec


class _Row(NamedTuple):
    """A kind of leaves that are no JAX arrays.

    Attributes:
        found: the types of such a leaf, none of whose subclasses are meant; NumPy's scalars are found by their base.
        dtype: dtype of the array that keeps the leaf; None: the leaf's own.
        give_back: makes the leaf from that array, sharing no memory with it.
        placed: kind of the leaf with a sharding.
    """

    found: tuple[type, ...]
    dtype: type | None
    give_back: Callable[[np.ndarray], Any]
    placed: LeafKind


HOST_KINDS: Final[Mapping[LeafKind, _Row]] = types.MappingProxyType(
    {
        LeafKind.BOOL: _Row((bool,), np.bool_, bool, LeafKind.ARRAY),
        LeafKind.INT: _Row((int,), np.int64, int, LeafKind.WEAK_ARRAY),
        LeafKind.FLOAT: _Row((float,), np.float64, float, LeafKind.WEAK_ARRAY),
        LeafKind.COMPLEX: _Row((complex,), np.complex128, complex, LeafKind.WEAK_ARRAY),
        LeafKind.NUMPY_ARRAY: _Row((np.ndarray, np.memmap), None, np.array, LeafKind.ARRAY),
        LeafKind.NUMPY_SCALAR: _Row((np.generic,), None, lambda array: array[()], LeafKind.ARRAY),
    }
)
"""The kinds in host memory. Of JAX arrays there are `ARRAY` and `WEAK_ARRAY`, which differ in their weak type alone.
Random keys are arrays that are kept as their raw data, with the name of their implementation."""

_KIND_OF_TYPE: Final = {found: kind for kind, row in HOST_KINDS.items() for found in row.found}
_NUMBERS_WITHOUT_DTYPE_IN_JAX: Final = (np.dtype(np.longdouble), np.dtype(np.clongdouble))
DTYPES_OUTSIDE_STORAGE: Final = frozenset({"int1", "uint1", "uint2", "uint4", "float8_e4m3"})
"""Of JAX's dtypes those that Orbax cannot write: a state with one is refused where checkpoints are to be saved."""
EXPECTED: Final = "a JAX or NumPy array of numbers, a number or a string"


class KeptLeaf(NamedTuple):
    """A leaf as it is kept.

    Attributes:
        value: array on devices, or in host memory. A random key is represented by its raw data.
        key_impl: the implementation of a random key; None for other leaves.
    """

    value: jax.Array | np.ndarray
    kind: LeafKind
    key_impl: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AbstractHostLeaf:
    """A leaf in host memory without its value, beside `jax.ShapeDtypeStruct` in an abstract tree.

    Attributes:
        kind: one of `HOST_KINDS`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: LeafKind

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def make_placed(self) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and weak type that a program sees."""
        return jax.ShapeDtypeStruct(
            self.shape,
            jax.dtypes.canonicalize_dtype(self.dtype),
            weak_type=HOST_KINDS[self.kind].placed is LeafKind.WEAK_ARRAY,
        )


def is_random_key(leaf: Any) -> bool:  # noqa: ANN401 - any array
    """Return whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def unwrap_key(leaf: jax.Array) -> tuple[jax.Array, str | None]:
    """Return the raw data of random keys and the name of their implementation; another array itself, and None.

    Raises:
        StateError: the implementation has no name by which another process could find it.
    """
    if not is_random_key(leaf):
        return leaf, None
    impl = jax.random.key_impl(leaf)
    if not isinstance(impl, str):
        raise StateError(
            f"a random key of the state: found the implementation {impl}, expected one that is registered with JAX, "
            "such as threefry2x32 or rbg, so that other processes know it"
        )
    return jax.random.key_data(leaf), impl


def keep_leaf(path: str, leaf: object) -> KeptLeaf:
    """Return a leaf as it is kept; a NumPy array is copied, a JAX array is not.

    Args:
        path: path of the leaf, for the error.
        leaf: a leaf of a state, and no string.

    Raises:
        StateError: leaves of this kind cannot come back as they are; the message says what to do.
    """
    if isinstance(leaf, jax.Array):
        _check_width(path, leaf)
        data, key_impl = unwrap_key(leaf)
        return KeptLeaf(data, LeafKind.WEAK_ARRAY if _is_weak(leaf) else LeafKind.ARRAY, key_impl)
    kind = _find_host_kind(path, leaf)
    try:
        return KeptLeaf(np.array(leaf, HOST_KINDS[kind].dtype), kind)
    except OverflowError as error:
        raise StateError(
            f"the state's leaf {path} is the Python int {leaf}, expected one of 64 bits. Keep larger ones as a string"
        ) from error


def make_abstract_leaf(path: str, leaf: object) -> AbstractHostLeaf:
    """Return a leaf in host memory without its value; raises as `keep_leaf`."""
    kept = keep_leaf(path, leaf)
    return AbstractHostLeaf(kept.value.shape, np.dtype(kept.value.dtype), kept.kind)


def find_abstract_kind(leaf: Any) -> LeafKind:  # noqa: ANN401 - an abstract leaf
    """Return the kind of a leaf of an abstract tree."""
    if isinstance(leaf, AbstractHostLeaf):
        return leaf.kind
    return LeafKind.WEAK_ARRAY if getattr(leaf, "weak_type", False) else LeafKind.ARRAY


def give_back(spec: LeafSpec, value: jax.Array | np.ndarray) -> Any:  # noqa: ANN401 - a leaf of any kind
    """Return the leaf that is kept as `value`; the inverse of `keep_leaf`.

    Args:
        value: array on devices; in host memory for the kinds that are kept there, and for a JAX array that is wanted
            there.
    """
    if spec.kind in HOST_KINDS:
        assert isinstance(value, np.ndarray), "leaves in host memory are placed nowhere"
        return HOST_KINDS[spec.kind].give_back(value)
    if spec.key_impl is not None:
        return jax.random.wrap_key_data(jnp.asarray(value), impl=spec.key_impl)
    if spec.kind is LeafKind.WEAK_ARRAY and isinstance(value, jax.Array) and not _is_weak(value):
        # The public functions make weakly typed scalars alone, and of two dtypes.
        return private_lax._convert_element_type(value, value.dtype, weak_type=True)
    return value


def place_spec(spec: LeafSpec) -> LeafSpec:
    """Return the spec of a leaf, once a sharding has made a JAX array of it.

    Raises:
        StateError: a JAX array of the leaf would have half of the leaf's bits.
    """
    if spec.kind not in HOST_KINDS:
        return spec
    dtype, placed = find_program_dtype(spec), HOST_KINDS[spec.kind].placed
    if placed is LeafKind.ARRAY and dtype != np.dtype(spec.dtype):
        raise StateError(
            f"the state's leaf {spec.path} is a {spec.kind} of {spec.dtype}{list(spec.shape)} with a sharding, "
            f"expected {dtype}: JAX without jax_enable_x64 has no 64-bit numbers. Make it {dtype} in init, or set "
            "jax_enable_x64"
        )
    return msgspec.structs.replace(spec, dtype=dtype.name, kind=placed)


def place_value(path: str, value: jax.Array | np.ndarray, placed: LeafSpec) -> jax.Array | np.ndarray:
    """Return a kept value in the dtype of `place_spec`.

    Raises:
        StateError: a Python number does not fit.
    """
    if value.dtype == placed.dtype:
        return value
    # Python numbers alone get here: `place_spec` refuses others that are too wide.
    with np.errstate(over="ignore"):
        narrow = np.asarray(value).astype(placed.dtype)
    fits = narrow == value if narrow.dtype.kind == "i" else np.isfinite(narrow) == np.isfinite(value)
    if not fits.all():
        raise StateError(
            f"the state's leaf {path} is the Python number {value} with a sharding, expected one that fits "
            f"{narrow.dtype}: set jax_enable_x64, or keep it outside of the state"
        )
    return narrow


def find_program_dtype(spec: LeafSpec) -> np.dtype[Any]:
    """Return the dtype that a program sees of a leaf: of one in host memory 32 bits in place of 64 without x64."""
    dtype = np.dtype(spec.dtype)
    return jax.dtypes.canonicalize_dtype(dtype) if spec.kind in HOST_KINDS else dtype


def make_strong(tree: Any) -> Any:  # noqa: ANN401 - a pytree of arrays and numbers
    """Return a tree of strongly typed arrays, for programs that are compiled ahead by shapes and dtypes alone.

    Raises:
        StateError: a NumPy leaf would lose half of its bits.
    """

    def convert(path: Any, leaf: Any) -> Any:  # noqa: ANN401 - any leaf
        if isinstance(leaf, jax.Array):
            return jax.lax.convert_element_type(leaf, leaf.dtype) if _is_weak(leaf) else leaf
        if isinstance(leaf, str):
            return leaf
        name = jax.tree_util.keystr(path)
        kept = keep_leaf(name, leaf)
        placed = place_spec(LeafSpec(name, kept.value.dtype.name, kept.value.shape, kind=kept.kind))
        return jnp.asarray(place_value(name, kept.value, placed))

    return jax.tree_util.tree_map_with_path(convert, tree)


def _is_weak(leaf: jax.Array) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def _check_width(path: str, leaf: jax.Array) -> None:
    """Refuse an array that was made in a block with 64 bits: outside of it the next program takes half of them."""
    if leaf.dtype.itemsize < 8 or is_random_key(leaf):
        return
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if dtype != leaf.dtype:
        raise StateError(
            f"the state's leaf {path} is a JAX array of {leaf.dtype}{list(leaf.shape)}, expected {dtype}: JAX without "
            f"jax_enable_x64 has no 64-bit numbers. Make it {dtype}, or set jax_enable_x64 for the whole script"
        )


def _find_host_kind(path: str, leaf: Any) -> LeafKind:  # noqa: ANN401 - anything
    kind = LeafKind.NUMPY_SCALAR if isinstance(leaf, np.generic) else _KIND_OF_TYPE.get(type(leaf))
    if kind is None:
        raise StateError(
            f"the state's leaf {path} is a {type(leaf).__name__}, expected {EXPECTED}. Convert it, or keep it outside "
            "of the state if it is the same on every host and in every step"
        )
    if HOST_KINDS[kind].dtype is None:
        dtype = leaf.dtype
        is_number = dtype.kind not in "USOMm" and dtype.type is not np.void
        if not is_number or not dtype.isnative or dtype in _NUMBERS_WITHOUT_DTYPE_IN_JAX:
            raise StateError(
                f"the state's leaf {path} is a {kind} of {dtype}, expected {EXPECTED}, of a dtype that JAX has, in "
                "this machine's byte order. Convert it, such as by astype, or keep it outside of the state"
            )
    return kind
