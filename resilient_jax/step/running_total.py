"""The running total of microbatches on one host: what adds a microbatch to it, and two totals of different ones.

Of an exact accumulation each large floating-point leaf is a `FixedPointSum`, and each small one a `BinnedSum`: loss and
metrics are small, and may be anything. Of `exact_wide` all are `BinnedSum`s. Complex numbers are two of them, on a last
dim of size 2. Integers are added as they are, which is exact; so are all leaves of a fast accumulation. The programs
are elementwise, so a total is sharded as its microbatches are, and none of them needs another device, except to find
the largest element of a leaf that is sharded.

The *limits* of an accumulation are those of its leaves in fixed point, int32[leaves in fixed point]; the *exponents* of
a microbatch say how large the elements of these leaves are (see `step.fixed_point_sum`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.step.assignment import AccumulationSpec, Reduction
from resilient_jax.step.binned_sum import (
    BinnedFormat,
    BinnedSum,
    add_binned,
    make_binned_zero,
    merge_binned,
    read_binned,
)
from resilient_jax.step.fixed_point_sum import (
    MAX_ADDENDS,
    FixedPointFormat,
    FixedPointSum,
    add_fixed_point,
    compute_exponent,
    read_fixed_point,
    to_fixed_point,
)

Tree = Any
"""A pytree of arrays."""
MAX_HOSTS: Final = 2**16
HOST_SLOTS: Final = 3
"""So many slots, of 15 bits each, hold a float32 sum over so many hosts to 2**-30 of the largest."""
MIN_FIXED_POINT_SIZE: Final = 1024
"""Elements of a leaf that is kept in fixed point. What smaller ones cost in bins is nothing beside the rest."""
NO_LIMITS: Final = np.zeros(0, np.int32)


def is_exact(leaf: object) -> bool:
    """Return whether this is one leaf's exact sum, for walking trees of totals."""
    return isinstance(leaf, FixedPointSum | BinnedSum)


def list_formats(spec: AccumulationSpec, like: Tree) -> list[FixedPointFormat]:
    """Return the formats of the leaves in fixed point: of the sum of such a tree, of arrays or their shapes."""
    formats = (choose_format(spec.reduction, spec.num_microbatches, leaf) for leaf in jax.tree.leaves(like))
    return [format for format in formats if isinstance(format, FixedPointFormat)]


def list_fixed_point_paths(spec: AccumulationSpec, like: Tree) -> list[str]:
    """Return the paths of the leaves in fixed point, in the order of `list_formats`."""
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(like)
        if isinstance(choose_format(spec.reduction, spec.num_microbatches, leaf), FixedPointFormat)
    ]


def choose_format(
    reduction: Reduction,
    max_addends: int,
    leaf: Any,  # noqa: ANN401 - an array or its shape
) -> FixedPointFormat | BinnedFormat | None:
    """Return how the sum of such leaves is kept; None: as they are."""
    is_large = math.prod(leaf.shape) >= MIN_FIXED_POINT_SIZE and max_addends <= MAX_ADDENDS
    return _choose_format(leaf.dtype, max_addends, reduction, is_large)


@functools.cache  # for each leaf of each step
def _choose_format(
    dtype: Any,  # noqa: ANN401 - what jnp takes for a dtype
    max_addends: int,
    reduction: Reduction,
    is_large: bool,
) -> FixedPointFormat | BinnedFormat | None:
    if reduction == "fast" or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    real = jnp.finfo(dtype).dtype
    if reduction == "exact" and is_large:
        return FixedPointFormat.for_addends(real, max_addends)
    return BinnedFormat.for_addends(real, max_addends)


def compute_exponents(spec: AccumulationSpec, microbatch: Tree) -> jax.Array:
    """Return int32[leaves in fixed point], how large a microbatch's elements are; see `compute_exponent`."""
    return _make_compute_exponents(spec.reduction, spec.num_microbatches)(microbatch)


def start_total(spec: AccumulationSpec, microbatch: Tree, limits: np.ndarray) -> Tree:
    """Return the total of one microbatch; of zeros, the total of none."""
    return _make_start(spec.reduction, spec.num_microbatches)(microbatch, limits)


def add_to_total(
    total: Tree, microbatch: Tree, limits: np.ndarray, *, donate: bool
) -> tuple[Tree, jax.Array]:
    """Return the total with one more microbatch, and that microbatch's exponents.

    A donated total's memory is used again, and the total lost.
    """
    return (_add_in_place if donate else _add)(total, microbatch, limits)


def describe_totals(spec: AccumulationSpec, like: Tree) -> list[Any]:
    """Return the shapes of the total of each leaf of a tree, of arrays or their shapes."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like)]
    limits = np.zeros(len(list_formats(spec, leaves)), np.int32)
    return jax.eval_shape(functools.partial(start_total, spec), leaves, limits)


def merge_totals(totals: Sequence[Tree]) -> Tree:
    """Return the total of all microbatches in these totals, which lie on the same devices."""
    return functools.reduce(_merge, totals)


def start_total_of_hosts(tree: Tree) -> Tree:
    """Return the total of one addend of each host, for whichever hosts there are: up to `MAX_HOSTS`."""
    return _start_of_hosts(tree)


@functools.cache
def _make_compute_exponents(reduction: Reduction, max_addends: int) -> Any:  # noqa: ANN401 - a jitted function
    @jax.jit
    def compute(microbatch: Tree) -> jax.Array:
        exponents = []
        for leaf in jax.tree.leaves(microbatch):
            format = choose_format(reduction, max_addends, leaf)
            if isinstance(format, FixedPointFormat):
                exponents.append(compute_exponent(split_complex(leaf).astype(format.float_dtype)))
        return _stack(exponents)

    return compute


def _stack(exponents: list[jax.Array]) -> jax.Array:
    return jnp.stack(exponents) if exponents else jnp.asarray(NO_LIMITS)


@functools.cache
def _make_start(reduction: Reduction, max_addends: int) -> Any:  # noqa: ANN401 - a jitted function
    @jax.jit
    def start(microbatch: Tree, limits: jax.Array) -> Tree:
        limit = iter(limits)

        def start_leaf(leaf: jax.Array) -> Any:  # noqa: ANN401 - an exact sum or an array
            format = choose_format(reduction, max_addends, leaf)
            if format is None:
                # Never the user's own array: what is added later takes its memory.
                return jnp.copy(leaf)
            real = split_complex(leaf)
            if isinstance(format, FixedPointFormat):
                return to_fixed_point(real, format, next(limit))
            return add_binned(make_binned_zero(real.shape, format), real)

        return jax.tree.map(start_leaf, microbatch)

    return start


@jax.jit
def _start_of_hosts(tree: Tree) -> Tree:
    def start_leaf(leaf: jax.Array) -> Any:  # noqa: ANN401 - an exact sum or an array
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        real = split_complex(leaf)
        format = BinnedFormat.for_addends(real.dtype, MAX_HOSTS, HOST_SLOTS)
        return add_binned(make_binned_zero(real.shape, format), real)

    return jax.tree.map(start_leaf, tree)


def _add_leaves(total: Tree, microbatch: Tree, limits: jax.Array) -> tuple[Tree, jax.Array]:
    limit, exponents = iter(limits), []

    def add_leaf(into: Any, leaf: jax.Array) -> Any:  # noqa: ANN401 - an exact sum or an array
        if not is_exact(into):
            return into + leaf
        real = split_complex(leaf)
        if isinstance(into, BinnedSum):
            return add_binned(into, real)
        exponents.append(compute_exponent(real.astype(into.format.float_dtype)))
        return add_fixed_point(into, to_fixed_point(real, into.format, next(limit)))

    return jax.tree.map(add_leaf, total, microbatch, is_leaf=is_exact), _stack(exponents)


_add = jax.jit(_add_leaves)
_add_in_place = jax.jit(_add_leaves, donate_argnums=0)


@jax.jit
def _merge(one: Tree, other: Tree) -> Tree:
    def merge_leaf(a: Any, b: Any) -> Any:  # noqa: ANN401 - exact sums or arrays
        if isinstance(a, FixedPointSum):
            return add_fixed_point(a, b)
        return merge_binned(a, b) if is_exact(a) else a + b

    return jax.tree.map(merge_leaf, one, other, is_leaf=is_exact)


def reshard_total(total: Tree, like: Tree) -> Tree:
    """Return the total with the shardings of the leaves of `like`, whose tree is a prefix of its own."""
    return jax.tree.map(lambda leaf, part: jax.device_put(part, leaf.sharding), like, total)


def read_total(total: Tree, limits: jax.Array | np.ndarray) -> Tree:
    """Return the sums as floats of at least 32 bits, where the leaves are exact; complex ones as two on a last dim."""
    limit = iter(limits)

    def read_leaf(leaf: Any) -> Any:  # noqa: ANN401 - an exact sum or an array
        if isinstance(leaf, FixedPointSum):
            return read_fixed_point(leaf, next(limit))
        return read_binned(leaf) if is_exact(leaf) else leaf

    return jax.tree.map(read_leaf, total, is_leaf=is_exact)


read_sums = jax.jit(read_total)
"""`read_total` as a program of its own."""


def split_complex(leaf: jax.Array) -> jax.Array:
    """Return complex numbers as real and imaginary parts on a last dim; other numbers as they are."""
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    return jnp.stack([leaf.real, leaf.imag], axis=-1)


def join_complex(real: jax.Array, dtype: Any) -> jax.Array:  # noqa: ANN401 - what jnp takes for a dtype
    """Return the numbers of which `split_complex` gave the parts, in their own dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(real[..., 0], real[..., 1]).astype(dtype)
    return real.astype(dtype)


def compile_totals(spec: AccumulationSpec, microbatch: Tree, check: Callable[[], None]) -> None:
    """Compile the programs of a replica's total, for the persistent cache.

    Args:
        microbatch: shapes, dtypes and shardings of what is summed.
        check: raises if compiling is to end.
    """
    limits = np.zeros(len(list_formats(spec, microbatch)), np.int32)
    check()
    _make_compute_exponents(spec.reduction, spec.num_microbatches).lower(microbatch).compile()
    check()
    start = _make_start(spec.reduction, spec.num_microbatches).lower(microbatch, limits)
    compiled = start.compile()
    check()
    total = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        start.out_info,
        compiled.output_shardings,
    )
    _add_in_place.lower(total, microbatch, limits).compile()


def compile_host_total(
    spec: AccumulationSpec, like: Tree, check: Callable[[], None], *, has_several: bool
) -> None:
    """Compile the programs of a host's total, for the persistent cache.

    A host that has computed nothing, because it is slow beside the others, begins with an empty one.

    Args:
        like: shapes, dtypes and shardings of the sums.
        check: raises if compiling is to end.
        has_several: whether the host has several replicas, whose totals are merged.
    """
    check()
    limits = np.zeros(len(list_formats(spec, like)), np.int32)
    start = _make_start(spec.reduction, spec.num_microbatches).lower(like, limits)
    start.compile()
    if not has_several:
        return
    check()
    total = jax.tree.map(
        lambda leaf, parts: jax.tree.map(
            lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=leaf.sharding), parts
        ),
        like,
        start.out_info,
    )
    _merge.lower(total, total).compile()
