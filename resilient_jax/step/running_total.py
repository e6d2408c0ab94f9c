"""The running total of microbatches on one host: what adds a microbatch to it, and two totals of different ones.

Of an exact accumulation each floating-point leaf is an `ExactSum`; complex numbers are two of them, on a last dim of
size 2. Integers are added as they are, which is exact; so are all leaves of a fast accumulation. The programs are
elementwise, so a total is sharded as its microbatches are, and none of them needs another device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.exact_sum import (
    NUM_SLOTS,
    ExactFormat,
    ExactSum,
    add_exactly,
    make_exact_zero,
    merge_exactly,
    read_exact_sum,
)

Tree = Any
"""A pytree of arrays."""
MAX_HOSTS: Final = 2**16
HOST_SLOTS: Final = 3
"""So many slots, of 15 bits each, hold a float32 sum over so many hosts to 2**-30 of the largest."""


def is_exact(leaf: object) -> bool:
    """Return whether this is one leaf's exact sum, for walking trees of totals."""
    return isinstance(leaf, ExactSum)


def start_total(spec: AccumulationSpec, microbatch: Tree) -> Tree:
    """Return the total of one microbatch; of zeros, the total of none."""
    return get_start_program(spec)(microbatch)


def add_to_total(total: Tree, microbatch: Tree, *, donate: bool) -> Tree:
    """Return the total with one more microbatch. A donated total's memory is used again, and the total lost."""
    return (add_in_place if donate else _add)(total, microbatch)


def merge_totals(totals: Sequence[Tree]) -> Tree:
    """Return the total of all microbatches in these totals, which lie on the same devices."""
    return functools.reduce(_merge, totals)


def start_total_of_hosts(tree: Tree) -> Tree:
    """Return the total of one addend of each host, for whichever hosts there are: up to `MAX_HOSTS`."""
    return _make_start(MAX_HOSTS, HOST_SLOTS)(tree)


def get_start_program(spec: AccumulationSpec) -> Any:  # noqa: ANN401 - a jitted function
    """Return the program that begins a total."""
    return _make_start(spec.num_microbatches if spec.reduction == "exact" else None, NUM_SLOTS)


@functools.cache
def _make_start(max_addends: int | None, num_slots: int) -> Any:  # noqa: ANN401 - a jitted function
    def start(leaf: jax.Array) -> Any:  # noqa: ANN401 - an exact sum or an array
        if max_addends is None or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            # Never the user's own array: what is added later takes its memory.
            return jnp.copy(leaf)
        real = split_complex(leaf)
        zero = make_exact_zero(real.shape, ExactFormat.for_addends(real.dtype, max_addends, num_slots))
        return add_exactly(zero, real)

    return jax.jit(lambda microbatch: jax.tree.map(start, microbatch))


def _add_leaves(total: Tree, microbatch: Tree) -> Tree:
    return jax.tree.map(
        lambda into, leaf: add_exactly(into, split_complex(leaf)) if is_exact(into) else into + leaf,
        total,
        microbatch,
        is_leaf=is_exact,
    )


_add = jax.jit(_add_leaves)
add_in_place = jax.jit(_add_leaves, donate_argnums=0)
"""As `add_to_total` with `donate`; for compiling it ahead."""


@jax.jit
def _merge(one: Tree, other: Tree) -> Tree:
    return jax.tree.map(
        lambda a, b: merge_exactly(a, b) if is_exact(a) else a + b, one, other, is_leaf=is_exact
    )


def reshard_total(total: Tree, like: Tree) -> Tree:
    """Return the total with the shardings of the leaves of `like`, whose tree is a prefix of its own."""
    return jax.tree.map(lambda leaf, part: jax.device_put(part, leaf.sharding), like, total)


def read_total(total: Tree) -> Tree:
    """Return the sums as floats of at least 32 bits, where the leaves are exact; complex ones as two on a last dim."""
    return jax.tree.map(
        lambda leaf: read_exact_sum(leaf) if is_exact(leaf) else leaf, total, is_leaf=is_exact
    )


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
        spec: of the accumulation.
        microbatch: shapes, dtypes and shardings of what is summed.
        check: raises if compiling is to end.
    """
    check()
    start = get_start_program(spec).lower(microbatch)
    compiled = start.compile()
    check()
    total = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        start.out_info,
        compiled.output_shardings,
    )
    add_in_place.lower(total, microbatch).compile()


def compile_merge(spec: AccumulationSpec, like: Tree, check: Callable[[], None]) -> None:
    """Compile what merges the totals of a host's replicas, or makes an empty one, for the persistent cache.

    Args:
        spec: of the accumulation.
        like: shapes, dtypes and shardings of the sums.
        check: raises if compiling is to end.
    """
    check()
    start = get_start_program(spec).lower(like)
    start.compile()
    check()
    total = jax.tree.map(
        lambda leaf, parts: jax.tree.map(
            lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=leaf.sharding), parts
        ),
        like,
        start.out_info,
    )
    _merge.lower(total, total).compile()
