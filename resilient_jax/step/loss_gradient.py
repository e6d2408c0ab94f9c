"""The value and gradient of a loss, which is refused where it depends on no parameter: nothing would be trained."""

from collections.abc import Callable
from typing import Any

import jax

from resilient_jax.errors import CallerError

Tree = Any
"""A pytree of arrays."""


def differentiate_loss(
    loss_of: Callable[[Tree], tuple[jax.Array, Tree]], params: Tree
) -> tuple[tuple[jax.Array, Tree], Tree]:
    """Return ((loss, aux), gradients), as `jax.value_and_grad(loss_of, has_aux=True)(params)`; to be traced.

    Raises:
        CallerError: the loss depends on no parameter.
    """

    def checked(params: Tree) -> tuple[jax.Array, Tree]:
        loss, aux = loss_of(params)
        # JAX differentiates by tracers of a kind of their own, and hands on what has no tangent as it is.
        if type(loss) not in {type(leaf) for leaf in jax.tree.leaves(params)}:
            raise CallerError(
                "loss_fn: found a loss that depends on no parameter, expected one that is computed from them: its "
                "gradient is zero, and nothing is trained. Look for a stop_gradient, a comparison or an integer "
                "between the parameters and the loss, or a model that is not called"
            )
        return loss, aux

    return jax.value_and_grad(checked, has_aux=True)(params)
