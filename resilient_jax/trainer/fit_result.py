"""The result of training."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from resilient_jax.errors import CallerError
from resilient_jax.state.flat_state import is_random_key
from resilient_jax.trainer.model_adapters import ModelAdapter, Variables
from resilient_jax.trainer.tree_digest import digest_tree

Tree = Any
"""A pytree of arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The trained model. Its variables are in host memory.

    Attributes:
        step: how many steps are committed.
        metrics: the metrics of the last step and the last evaluation on this host, as floats; empty if it made none.
        variables: numpy arrays, of a random key its raw data. Of an `nnx` model they are dicts, as
            `nnx.update(model, params)` takes them; of a Linen model its collections.
        ema_params: the average of the parameters, in the same tree; None without `Numerics(ema_decay=...)`.
        adapter: what makes the model from its variables.
        stop_reason: why training ended before the last step; None: it did not.
        host_index: this host's index in the last generation; host 0 prints and saves.
    """

    step: int
    metrics: Mapping[str, float]
    variables: Variables
    ema_params: Tree | None
    adapter: ModelAdapter
    stop_reason: str | None
    host_index: int

    @property
    def model(self) -> Any:  # noqa: ANN401 - an nnx.Module or a tree
        """The trained `nnx.Module`; of a Linen model its variables, as `apply` takes them; of a function its tree.

        A module is made newly at each access, on this host's first device, in the mode in which its factory left it.
        """
        return self.adapter.make_model(self.variables)

    @property
    def ema_model(self) -> Any:  # noqa: ANN401 - as model
        """The model with the average of the parameters in their place.

        Raises:
            CallerError: no average was kept.
        """
        if self.ema_params is None:
            raise CallerError(
                "ema_model: found no average of the parameters, expected one: Trainer(numerics=rj.Numerics("
                "ema_decay=0.999))"
            )
        return self.adapter.make_model(self.variables._replace(params=self.ema_params))

    @property
    def params(self) -> Tree:
        """The trained parameters of the model, without frozen ones."""
        return self.variables.params

    @property
    def params_sha256(self) -> str:
        """The digest of the parameters, computed at each access; see `digest_tree`."""
        return digest_tree(self.params)


def copy_to_numpy(tree: Tree) -> Tree:
    """Return copies in host memory: on a CPU `np.asarray` would share the device's memory."""
    return jax.tree.map(
        lambda leaf: np.array(jax.random.key_data(leaf) if is_random_key(leaf) else leaf), tree
    )
