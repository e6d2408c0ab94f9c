"""The exponential moving average of the parameters, kept in the optimizer's state.

    ema_0 = params_0,    ema_t = decay ema_{t-1} + (1 - decay) params_t

In the optimizer's state it is sharded, protected and saved like every other leaf that belongs to a parameter.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any
"""A pytree of arrays."""


class EmaState(NamedTuple):
    """The state of an optimizer whose parameters are averaged.

    Attributes:
        optimizer: state of the user's optimizer alone.
        ema_params: average of the parameters, in the shapes and dtypes of the parameters.
    """

    optimizer: optax.OptState
    ema_params: Tree


def track_ema(optimizer: optax.GradientTransformation, decay: float | None) -> optax.GradientTransformation:
    """Return the optimizer, keeping the average of the parameters that it makes; None: the optimizer as it is."""
    if decay is None:
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> EmaState:
        # Copies: the state is donated, which an array that is in it twice cannot be.
        return EmaState(inner.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Tree, state: EmaState, params: Tree = None, **extra: object) -> tuple[Tree, EmaState]:
        updates, optimizer_state = inner.update(updates, state.optimizer, params, **extra)
        new = optax.apply_updates(params, updates)
        return updates, EmaState(optimizer_state, optax.incremental_update(new, state.ema_params, 1 - decay))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType] - narrower types


def find_ema_params(opt_state: optax.OptState) -> Tree | None:
    """Return the average of the parameters; None: it is not kept."""
    return opt_state.ema_params if isinstance(opt_state, EmaState) else None
