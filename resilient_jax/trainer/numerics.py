"""Numerics of a step: precision, clipping, rematerialization, averages, and the policy for non-finite microbatches."""

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.errors import CallerError

Tree = Any
"""A pytree of arrays."""


class NonFinitePolicy(enum.StrEnum):
    """What happens to a microbatch whose loss, gradient or batch_stats have a NaN or an infinity."""

    STOP = "stop"
    """All hosts raise `NonFiniteError`, before the state is changed."""
    SKIP = "skip"
    """The step is the mean over the other microbatches; training stops if there is none."""
    WARN = "warn"
    """The step uses the microbatch as it is."""


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The precision of a step, clipping, rematerialization, averaging, and what becomes of non-finite values.

    Attributes:
        clip_norm: the largest global norm of a step's gradient; None: no clipping.
        compute_dtype: a dtype such as `jnp.bfloat16`: the loss gets the parameters in this dtype, while the optimizer
            and the sums over microbatches keep theirs. Batches are not cast: batches of another dtype widen the
            activations. None: no cast.
        remat: recompute activations in the backward pass instead of keeping them (`jax.checkpoint`).
        non_finite: "stop", "skip" or "warn".
        ema_decay: keep an exponential moving average of the parameters, `decay * average + (1 - decay) * params` after
            each step: `FitResult.ema_params`, and `Evaluation(use_ema=True)`. None: no average.

    Raises:
        CallerError: a value is impossible.
    """

    clip_norm: float | None = None
    compute_dtype: Any = None
    remat: bool = False
    non_finite: NonFinitePolicy | str = NonFinitePolicy.STOP
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise CallerError(
                f"clip_norm: found {self.clip_norm}, expected a positive number, or None for no clip"
            )
        if self.compute_dtype is not None and not _is_floating(self.compute_dtype):
            raise CallerError(
                f"compute_dtype: found {self.compute_dtype!r}, expected a floating-point type, such as jnp.bfloat16"
            )
        if self.compute_dtype is not None and jnp.dtype(self.compute_dtype) == jnp.float16:
            raise CallerError(
                "compute_dtype: found float16, expected jnp.bfloat16. Gradients in float16 underflow without loss "
                "scaling (DynamicScale), which is not supported; bfloat16 has the exponents of float32 and needs none"
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise CallerError(
                f"ema_decay: found {self.ema_decay}, expected a number from 0 up to but not 1, such as 0.999; None for "
                "no average"
            )
        if self.non_finite not in list(NonFinitePolicy):
            raise CallerError(
                f"non_finite: found {self.non_finite!r}, expected one of {', '.join(NonFinitePolicy)}"
            )


def _is_floating(dtype: Any) -> bool:  # noqa: ANN401 - whatever the user gave
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # no dtype at all
        return False


def cast_floats(tree: Tree, dtype: Any) -> Tree:  # noqa: ANN401 - what jnp takes for a dtype
    """Return the tree with its floating-point leaves in `dtype`; None: as it is."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def clip_by_norm(gradients: Tree, norm: jax.Array, max_norm: float) -> Tree:
    """Return the gradients, scaled so that their global norm is `max_norm` at most: g min(1, max_norm / norm).

    As `optax.clip_by_global_norm`, but for a given norm: the gradients may be shards.
    """
    return jax.tree.map(lambda leaf: jnp.where(norm < max_norm, leaf, leaf / norm * max_norm), gradients)


def is_all_finite(tree: Tree) -> jax.Array:
    """Return bool[]: whether no element of the tree is NaN or infinite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))
