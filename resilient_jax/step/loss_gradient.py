"""The value and gradient of a loss: refused where nothing would be trained, warned of where it is made anew."""

import logging
from collections.abc import Callable
from typing import Any, Final

import jax

from resilient_jax.errors import CallerError
from resilient_jax.weighted_mean import WeightedMean

Tree = Any
"""A pytree of arrays."""
MANY: Final = 4
"""Functions of the same lines in one generation: a few may differ in what they have captured."""

logger = logging.getLogger(__name__)


def differentiate_loss(
    loss_of: Callable[[Tree], tuple[jax.Array | WeightedMean, Tree]], params: Tree
) -> tuple[tuple[jax.Array | WeightedMean, Tree], Tree]:
    """Return ((loss, aux), gradients), as `jax.value_and_grad(loss_of, has_aux=True)(params)`; to be traced.

    Of a `WeightedMean` the gradients are those of its total.

    Raises:
        CallerError: the loss depends on no parameter.
    """

    def checked(params: Tree) -> tuple[jax.Array, Tree]:
        found, aux = loss_of(params)
        loss = found.total if isinstance(found, WeightedMean) else found
        # JAX differentiates by tracers of a kind of their own, and hands on what has no tangent as it is.
        if type(loss) not in {type(leaf) for leaf in jax.tree.leaves(params)}:
            raise CallerError(
                "loss_fn: found a loss that depends on no parameter, expected one that is computed from them: its "
                "gradient is zero, and nothing is trained. Look for a stop_gradient, a comparison or an integer "
                "between the parameters and the loss, or a model that is not called"
            )
        return loss, (found, aux)

    (_, found), gradients = jax.value_and_grad(checked, has_aux=True)(params)
    return found, gradients


class LossFunctions:
    """The loss functions of one generation, by their code."""

    def __init__(self) -> None:
        self._made: dict[Any, list[Callable[..., Any]]] = {}

    def warn_of_new(self, loss_fn: Callable[..., Any]) -> None:
        """Warn of a loop that makes a new function of the same lines in each step."""
        code = getattr(loss_fn, "__code__", None)
        made = self._made.setdefault(code, [])
        if code is None or any(loss_fn is one for one in made):
            return
        made.append(loss_fn)
        if len(made) == MANY:
            logger.warning(
                "value_and_grad: found %d functions made by line %d of %s in one generation, expected one: each is "
                "compiled anew. Define the loss outside of `train`, and call value_and_grad once, before the loop; "
                "what changes from step to step is an argument of the function that it returns",
                len(made),
                code.co_firstlineno,
                code.co_filename,
            )
