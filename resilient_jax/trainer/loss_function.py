"""The user's loss function: its signature is checked at once, its results while it is traced."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from resilient_jax.errors import CallerError
from resilient_jax.step.random_keys import KEY_NAMES, call_with_key, find_key_name
from resilient_jax.weighted_mean import WeightedMean, read_weighted_mean

Mean = jax.Array | WeightedMean
"""What a microbatch gives of a mean: its own one, float32[], or total and weight."""
Metrics = dict[str, Any]
"""A `Mean` each; of a step float32[]."""
RESERVED_METRICS: Final = frozenset({"loss", "grad_norm", "skipped", "self", "state"})
"""Metrics of the trainer, and other parameters of `World.commit`."""
EVALUATION_PREFIX: Final = "eval_"

EXPECTED_LOSS: Final = (
    "expected loss_fn(model, batch), which returns the mean over the batch, or an rj.WeightedMean. The batch is one "
    "argument, with the tree "
    f"of the data; a parameter for random numbers is the third, and is called {', '.join(KEY_NAMES)}: the first three "
    "get a jax.random key, the last an nnx.Rngs"
)


@dataclasses.dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss function with one signature: it takes a key and returns float32.

    Attributes:
        function: `function(model, batch)`, or with a key as well; returns the mean over the batch, a scalar or a
            `WeightedMean`, or that mean and a dict of means by name.
        key_name: the function's parameter of `KEY_NAMES`; None: the function takes no key.
    """

    function: Callable[..., Any]
    key_name: str | None

    def __call__(self, model: Any, batch: Any, key: jax.Array) -> tuple[Mean, Metrics]:  # noqa: ANN401
        """Return (loss, metrics). Exceptions of the function pass unchanged.

        Raises:
            CallerError: the function returns something else; the message says what.
        """
        found = call_with_key(self.function, self.key_name, key, model, batch)
        value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return _read_loss(value), _check_metrics(metrics)


def adapt_loss(function: object) -> LossFunction:
    """Return the user's loss function as a `LossFunction`.

    Raises:
        CallerError: the function cannot be called with a model, a batch and at most one of `KEY_NAMES`.
    """
    key_name = find_key_name(function, 2, EXPECTED_LOSS)
    assert callable(function), "checked above"
    return LossFunction(function, key_name)


def check_same_means(found: tuple[Mean, Metrics], first: tuple[Mean, Metrics]) -> None:
    """Refuse a loss function that returns other means than when it was first traced: they cannot be added to these.

    Args:
        found: (loss, metrics) of a microbatch.
        first: (loss, metrics) when first traced, or sums or shapes of these.

    Raises:
        CallerError: one of the two is a scalar and the other a `WeightedMean`, or metrics have other names.
    """
    mine, expected = ({"loss": loss, **metrics} for loss, metrics in (found, first))
    if jax.tree.structure(mine) != jax.tree.structure(expected):
        raise CallerError(
            f"loss: found {_describe_means(mine)}, where it first returned {_describe_means(expected)}; expected the "
            "same in each microbatch of each step"
        )


def _describe_means(means: Metrics) -> str:
    return ", ".join(
        f"{name} as {'a WeightedMean' if isinstance(mean, WeightedMean) else 'a scalar'}"
        for name, mean in means.items()
    )


def _read_loss(value: object) -> Mean:
    if isinstance(value, WeightedMean):
        return read_weighted_mean(value, "loss")
    found = _describe(value)
    if found != "a scalar":
        raise CallerError(
            f"loss: found {found}, expected a scalar, or (scalar, {{name: scalar}}). Take the mean over the batch: "
            "return jnp.mean(...), or of some of its rows or tokens rj.WeightedMean(total, weight)"
        )
    scalar = jnp.asarray(value)
    if not jnp.issubdtype(scalar.dtype, jnp.floating):
        raise CallerError(f"loss: found a scalar of dtype {scalar.dtype}, expected a floating-point number")
    return scalar.astype(jnp.float32)


def _check_metrics(metrics: object) -> Metrics:
    if not isinstance(metrics, Mapping):
        raise CallerError(
            f"loss: found {_describe(metrics)} as the second result, expected a dict of scalars by name. A sum and its "
            "weight are rj.WeightedMean(total, weight). "
            "A step's metrics are their means over its microbatches; objects that add up metrics, such as "
            "nnx.MultiMetric and clu.metrics, are not needed: return {name: jnp.mean(...)}"
        )
    for name in metrics:
        if not isinstance(name, str) or name in RESERVED_METRICS or name.startswith(EVALUATION_PREFIX):
            raise CallerError(
                f"loss: found the metric {name!r}, expected a name other than "
                f"{', '.join(sorted(RESERVED_METRICS))} and without "
                f"{EVALUATION_PREFIX} in front. Rename it"
            )
    return {name: _read_metric(name, metrics[name]) for name in sorted(metrics)}


def _read_metric(name: str, value: object) -> Mean:
    if isinstance(value, WeightedMean):
        return read_weighted_mean(value, f"loss: metric {name!r}")
    if (found := _describe(value)) != "a scalar":
        raise CallerError(
            f"loss: found {found} as the metric {name!r}, expected a scalar or an rj.WeightedMean. Take the mean over "
            "the batch"
        )
    return jnp.asarray(value, jnp.float32)


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(value, bool | int | float) or shape == ():
        return "a scalar"
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
