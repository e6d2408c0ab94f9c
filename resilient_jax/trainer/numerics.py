"""How the numbers of a step are made: precision, clipping, and what is done about those that are not finite."""

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp

from resilient_jax.errors import CallerError

Tree = Any
"""A pytree of arrays."""


class NonFinitePolicy(enum.StrEnum):
    """What is done about a microbatch whose loss, gradient or statistics have a NaN or an infinity."""

    STOP = "stop"
    """All hosts raise `NonFiniteError`, before anything is changed."""
    SKIP = "skip"
    """The step is the mean over the other microbatches; stop if there is none."""
    WARN = "warn"
    """The step goes on with the numbers as they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How the numbers of a step are made.

    Attributes:
        clip_norm: the largest global norm of a step's gradient; None: any.
        compute_dtype: such as `jnp.bfloat16`: the loss gets the parameters in it, while the optimizer and the sums over
            microbatches keep theirs. Batches are not cast: give them in this type, or they widen what they touch.
        remat: compute activations anew in the backward pass instead of keeping them (`jax.checkpoint`).
        non_finite: "stop", "skip" or "warn".

    Raises:
        CallerError: a value is impossible.
    """

    clip_norm: float | None = None
    compute_dtype: Any = None
    remat: bool = False
    non_finite: NonFinitePolicy | str = NonFinitePolicy.STOP

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise CallerError(
                f"clip_norm: found {self.clip_norm}, expected a positive number, or None for no clip"
            )
        if self.compute_dtype is not None and not jnp.issubdtype(self.compute_dtype, jnp.floating):
            raise CallerError(
                f"compute_dtype: found {self.compute_dtype}, expected a floating-point type, such as jnp.bfloat16"
            )
        if self.non_finite not in list(NonFinitePolicy):
            raise CallerError(
                f"non_finite: found {self.non_finite!r}, expected one of {', '.join(NonFinitePolicy)}"
            )


def cast_floats(tree: Tree, dtype: Any) -> Tree:  # noqa: ANN401 - what jnp takes for a dtype
    """The tree with its floating-point leaves in `dtype`; None: as it is."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def clip_by_norm(gradients: Tree, norm: jax.Array, max_norm: float) -> Tree:
    """The gradients, scaled down so that their global norm is `largest` at most: g min(1, largest / norm).

    As `optax.clip_by_global_norm`, but with a norm that is known: the gradients may be pieces.
    """
    return jax.tree.map(lambda leaf: jnp.where(norm < max_norm, leaf, leaf / norm * max_norm), gradients)


def is_all_finite(tree: Tree) -> jax.Array:
    """bool[]: whether no number in it is NaN or infinite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))
