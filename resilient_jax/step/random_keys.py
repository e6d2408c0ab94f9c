"""The random numbers of a microbatch: a key that depends on the seed, the step and the index alone, on no host."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError

RNGS: Final = "rngs"
KEY_NAMES: Final = ("key", "rng", "dropout_rng", RNGS)
"""What a loss function may call the parameter that gets random numbers. It gets a key of `jax.random`; under `rngs`, as
Flax NNX has it, an `nnx.Rngs` made of that key: `rngs.dropout()` is a key, and a module takes it as `rngs=rngs`."""


def make_microbatch_id(step: int, index: int) -> np.ndarray:
    """Return uint32[2], the step and the index, as the programs take them: other values compile nothing."""
    return np.array([step, index], np.uint32)


def make_microbatch_key(seed: int | jax.Array, microbatch_id: jax.Array) -> jax.Array:
    """Return the key of one microbatch, a pure function of (seed, step, index)."""
    # Two folds: one of a combined number, such as step + index, would give several microbatches the same key.
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), microbatch_id[0]), microbatch_id[1])


def find_key_name(loss_fn: object, num_arguments: int, expected: str) -> str | None:
    """Return the parameter of `KEY_NAMES` that a loss function has; None: it takes no random numbers.

    Args:
        loss_fn: the user's function.
        num_arguments: how many positional arguments it will be called with.
        expected: what the message of an error says that the function should be.

    Raises:
        CallerError: no such call is possible: with that many arguments and at most one of `KEY_NAMES`.
    """
    if not callable(loss_fn):
        raise CallerError(f"loss_fn: found {describe_value(loss_fn)}, {expected}")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin that has none
        return None
    names = [name for name in signature.parameters if name in KEY_NAMES]
    try:
        signature.bind(*range(num_arguments), **dict.fromkeys(names))
    except TypeError as error:
        raise CallerError(f"loss_fn: found a function of {signature}, {expected}") from error
    if len(names) > 1:
        raise CallerError(
            f"loss_fn: found the parameters {' and '.join(names)}, expected one of them: they would get the same "
            "random numbers. Split one key: jax.random.split(key)"
        )
    return names[0] if names else None


def call_with_key(
    function: Callable[..., Any], key_name: str | None, key: jax.Array, *arguments: object
) -> Any:  # noqa: ANN401 - what the user's function returns
    """Call a loss function, with random numbers if it has a parameter for them."""
    if key_name is None:
        return function(*arguments)
    return function(*arguments, **{key_name: nnx.Rngs(key) if key_name == RNGS else key})
