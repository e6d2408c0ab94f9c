"""The user's loss function, whose results are checked while it is traced."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from resilient_jax.errors import CallerError

Metrics = dict[str, jax.Array]
"""float32[] each."""
RESERVED_METRICS: Final = frozenset({"loss", "grad_norm", "skipped", "self", "state"})
"""Metrics of the trainer, and other parameters of `World.commit`."""
EVALUATION_PREFIX: Final = "eval_"


@dataclasses.dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss function with one signature: it takes a key and returns float32.

    Attributes:
        function: `function(model, batch)` or `function(model, batch, key=...)`; returns the mean over the batch, a
            scalar, or that scalar and a dict of scalars by name.
        takes_key: whether the function has a parameter `key`.
    """

    function: Callable[..., Any]
    takes_key: bool

    def __call__(self, model: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Metrics]:  # noqa: ANN401
        """Return (loss float32[], metrics). Exceptions of the function pass unchanged.

        Raises:
            CallerError: the function returns something else; says what.
        """
        found = self.function(model, batch, key=key) if self.takes_key else self.function(model, batch)
        value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return _scalar(value), _check_metrics(metrics)


def adapt_loss(function: object) -> LossFunction:
    """Return the user's loss function as a `LossFunction`.

    Raises:
        CallerError: it cannot be called.
    """
    if not callable(function):
        raise CallerError(
            f"loss_fn: found a {type(function).__name__}, expected a function loss_fn(model, batch) that "
            "returns a scalar"
        )
    try:
        takes_key = "key" in inspect.signature(function).parameters
    except ValueError:  # a builtin
        takes_key = False
    return LossFunction(function, takes_key)


def _scalar(value: object) -> jax.Array:
    found = _describe(value)
    if found != "a scalar":
        raise CallerError(
            f"loss: found {found}, expected a scalar, or (scalar, {{name: scalar}}). Take the mean over the batch: "
            "return jnp.mean(...)"
        )
    scalar = jnp.asarray(value)
    if not jnp.issubdtype(scalar.dtype, jnp.floating):
        raise CallerError(f"loss: found a scalar of dtype {scalar.dtype}, expected a floating-point number")
    return scalar.astype(jnp.float32)


def _check_metrics(metrics: object) -> Metrics:
    if not isinstance(metrics, Mapping):
        raise CallerError(
            f"loss: found {_describe(metrics)} as the second result, expected a dict of scalars by name"
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or name in RESERVED_METRICS or name.startswith(EVALUATION_PREFIX):
            raise CallerError(
                f"loss: found the metric {name!r}, expected a name other than "
                f"{', '.join(sorted(RESERVED_METRICS))} and without "
                f"{EVALUATION_PREFIX} in front. Rename it"
            )
        if (found := _describe(value)) != "a scalar":
            raise CallerError(
                f"loss: found {found} as the metric {name!r}, expected a scalar. Take the mean over the batch"
            )
    return {name: jnp.asarray(metrics[name], jnp.float32) for name in sorted(metrics)}


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(value, bool | int | float) or shape == ():
        return "a scalar"
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
