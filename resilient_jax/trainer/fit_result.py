"""The result of training."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from resilient_jax.errors import CallerError
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.state.leaf_kinds import is_random_key
from resilient_jax.trainer.model_adapters import ModelAdapter, Variables

Tree = Any
"""A pytree of arrays."""


class TrainedModel(NamedTuple):
    """What the hosts have of the trained model when training ends.

    Attributes:
        variables: arrays in host memory; None: no host has all variables.
        ema_params: the average of the parameters; None: no average was kept, or no host has the whole.
        params_sha256: the digest of the parameters, where hosts compute the digest together; None: `digest_tree`
            computes it.
    """

    variables: Variables | None
    ema_params: Tree | None
    params_sha256: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The trained model. Its variables are in host memory, but where no host has all: in the last checkpoint.

    Attributes:
        step: how many steps are committed.
        metrics: the metrics of the last step and the last evaluation on this host, as floats; empty if this host made
            none.
        trained: what this host has of the trained model.
        adapter: what makes the model from its variables.
        stop_reason: why training ended before the last step; None: training did not end before.
        host_index: this host's index in the last generation; host 0 prints and saves.
        checkpoint_directory: where the state after the last step is, as a checkpoint; None without `checkpoints=`, and
            if the state could not be saved.
        checkpoint_failure: why the state could not be saved; the model is in this result alone. Empty: the state was
            saved, or need not be.
    """

    step: int
    metrics: Mapping[str, float]
    trained: TrainedModel
    adapter: ModelAdapter
    stop_reason: str | None
    host_index: int
    checkpoint_directory: str | Path | None
    checkpoint_failure: str = ""

    @property
    def variables(self) -> Variables:
        """The variables: numpy arrays, of a random key its raw data.

        Of an `nnx` model they are dicts, as `nnx.update(model, params)` takes them; of a Linen model its collections.

        Raises:
            CallerError: no host has all variables: the job had `Parallelism(axes=)`, or a pipeline without
                `gather_result=True`.
        """
        return self._require_variables()

    @property
    def ema_params(self) -> Tree | None:
        """The average of the parameters, in their tree; None without `Numerics(ema_decay=...)`.

        Raises:
            CallerError: see `variables`.
        """
        self._require_variables()
        return self.trained.ema_params

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
        """The SHA-256 of the parameters, in hex: `digest_tree(params)`, computed at each access.

        In a pipeline it is that of the digests of all weights instead, which the hosts exchange when training ends. It
        does not depend on how many hosts there are and which has what, but is another one than `digest_tree` makes.
        """
        return self.trained.params_sha256 or digest_tree(self.params)

    def _require_variables(self) -> Variables:
        if self.trained.variables is not None:
            return self.trained.variables
        if self.checkpoint_directory is not None:
            where = f"It is the checkpoint of step {self.step} in {self.checkpoint_directory}."
        else:
            where = "It was not saved: use Trainer(checkpoints=rj.Checkpoints(...))."
        raise CallerError(
            "result: found a model that was trained in a pipeline, or over axes, of which no host has all, expected it "
            f"in this host's memory. {where} If that of a pipeline fits the memory of each host, "
            "Pipeline(gather_result=True) brings it there"
        )


def copy_to_numpy(tree: Tree) -> Tree:
    """Return copies in host memory: on a CPU `np.asarray` would share the device's memory."""
    return jax.tree.map(
        lambda leaf: np.array(jax.random.key_data(leaf) if is_random_key(leaf) else leaf), tree
    )
