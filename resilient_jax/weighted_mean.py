"""`WeightedMean`: the mean over real tokens or rows, which a loss or a metric of a microbatch is a part of.

A step's mean is (sum of totals) / (sum of weights), of all its microbatches, and not the mean of their means. Gradients
are of the totals, and are divided by the same sum of weights. What is divided is known only when all microbatches are,
so the division is made once, of exact sums: neither the division into microbatches nor the hosts change the mean.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError

WEIGHTS: Final = "total weights"
"""In front of the name of a mean, and a slash: the name of its weight, where totals and weights have names alone."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("total", "weight"), meta_fields=())
@dataclasses.dataclass(frozen=True, slots=True)
class WeightedMean:
    """A mean over what really counts in a microbatch, such as the tokens that are no padding: its sum, and its weight.

    A loss function returns it in place of a mean, and in place of a metric. The step's mean is then the sum of the
    totals of all microbatches, divided by the sum of their weights. The gradient is that of the totals, divided by the
    same: it is that of one batch of all rows, however these are divided into microbatches. The weight is not
    differentiated. Sums are exact, as those of gradients are.

    If all weights of a step are zero, its mean and its gradient are zero. A weight that is negative or not finite
    counts as NaN.

    Example:
        >>> def loss_fn(model, batch):
        ...     losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        ...     return rj.WeightedMean(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))  # doctest: +SKIP

    Attributes:
        total: float[], the sum of what is averaged, each times its weight.
        weight: float[] or int[], the sum of the weights: how many tokens or rows count.
    """

    total: Any
    weight: Any

    @property
    def mean(self) -> jax.Array:
        """The mean, float32[] or wider: 0 where the weight is 0, NaN where that is negative or not finite."""
        return jnp.asarray(self.total) / find_divisor(self.weight)


def is_weighted(node: object) -> bool:
    """Return whether this is a `WeightedMean`, for walking trees of means."""
    return isinstance(node, WeightedMean)


def read_weighted_mean(found: WeightedMean, name: str) -> WeightedMean:
    """Return what a user's function gave, float32[] each; a weight that is no weight is NaN.

    Raises:
        CallerError: the total or the weight is no number; the message says of what.
    """
    for part, value in (("total", found.total), ("weight", found.weight)):
        is_number = isinstance(value, bool | int | float) or getattr(value, "shape", None) == ()
        if not is_number or jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
            shape = getattr(value, "shape", None)
            what = describe_value(value) if shape is None else f"an array of shape {tuple(shape)}"
            raise CallerError(
                f"{name}: found {what} as the {part} of a WeightedMean, expected one number. Add up over the batch: "
                "rj.WeightedMean(jnp.sum(values * weights), jnp.sum(weights))"
            )
    if not jnp.issubdtype(jnp.result_type(found.total), jnp.floating):
        raise CallerError(
            f"{name}: found a total of dtype {jnp.result_type(found.total)} in a WeightedMean, expected a "
            "floating-point number"
        )
    # Not differentiated, as the mask of real tokens is not. A sum of such weights must not look like a weight.
    weight = jax.lax.stop_gradient(jnp.asarray(found.weight, jnp.float32))
    is_weight = (weight >= 0) & (weight < jnp.inf)
    return WeightedMean(jnp.asarray(found.total, jnp.float32), jnp.where(is_weight, weight, jnp.nan))


def find_divisor(weight: Any) -> jax.Array:  # noqa: ANN401 - an array or a number
    """Return float[], what a total of this weight is divided by: infinity where the weight is 0, so that the mean is 0.

    NaN, where it is negative or not finite.
    """
    weight = jnp.asarray(weight, jnp.promote_types(jnp.result_type(weight), jnp.float32))
    return jnp.where(weight == 0, jnp.inf, jnp.where((weight > 0) & (weight < jnp.inf), weight, jnp.nan))


def read_divisor(weight: float) -> float:
    """Return what `find_divisor` does, of a number in host memory."""
    if weight == 0:
        return math.inf
    return weight if 0 < weight < math.inf else math.nan


# Means by name, as numbers: where results of a program have no structure.


def split_weights(means: Mapping[str, Any]) -> dict[str, Any]:
    """Return totals by the names of the means, and weights by `WEIGHTS`/name; other means as they are.

    >>> split_weights({"loss": WeightedMean(6.0, 3.0), "spread": 1.0})
    {'loss': 6.0, 'total weights/loss': 3.0, 'spread': 1.0}
    """
    found: dict[str, Any] = {}
    for name, mean in means.items():
        if isinstance(mean, WeightedMean):
            found |= {name: mean.total, f"{WEIGHTS}/{name}": mean.weight}
        else:
            found[name] = mean
    return found


def join_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means of which `split_weights` gave the parts.

    >>> join_weights({"loss": 6.0, "total weights/loss": 3.0, "spread": 1.0})
    {'loss': WeightedMean(total=6.0, weight=3.0), 'spread': 1.0}
    """
    weights = {name: value for name, value in values.items() if name.startswith(f"{WEIGHTS}/")}
    return {
        name: WeightedMean(value, weights[f"{WEIGHTS}/{name}"]) if f"{WEIGHTS}/{name}" in weights else value
        for name, value in values.items()
        if name not in weights
    }
