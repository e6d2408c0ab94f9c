"""The trainer: a Flax or Optax user's model, loss and data in a loop that survives failures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optax

from resilient_jax.data.microbatch_rows import check_integers
from resilient_jax.data.microbatches import make_microbatch_data
from resilient_jax.errors import CallerError
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.early_stopping import EarlyStopping
from resilient_jax.trainer.evaluation import Evaluation
from resilient_jax.trainer.fit_config import FitConfig, Parallelism, ReadOptions, StateSharding
from resilient_jax.trainer.fit_loop import FitLoop
from resilient_jax.trainer.fit_result import FitResult
from resilient_jax.trainer.loss_function import EVALUATION_PREFIX, adapt_loss
from resilient_jax.trainer.model_adapters import adapt_model
from resilient_jax.trainer.numerics import Numerics
from resilient_jax.trainer.planner import Planner
from resilient_jax.trainer.progress_bar import ProgressBar, is_progress_wanted
from resilient_jax.trainer.step_programs import Recipe, check_optimizer
from resilient_jax.trainer.step_report import Callback
from resilient_jax.worker.run import run
from resilient_jax.worker.world import ONE_REPLICA_PER_HOST

MAX_SEED = 2**32
"""Seeds are 32 bits wide wherever they go: JAX's keys, the shuffle."""


class Trainer:
    """Trains a model on hosts of which any may die, with the same batches in the same order as if none had.

    A step is the mean over B = batch_size / microbatch_size microbatches, each computed by one replica; with
    reproducible sums the weights are bit for bit those of a run without failures. That ends where the model, the loss
    or the data are no pure functions of their arguments.

    Making one touches no device: models come as functions, and are made inside of `fit`.

    Example:
        >>> import resilient_jax as rj
        >>> def loss(model, batch):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> trainer = rj.Trainer(
        ...     model=lambda rngs: Net(rngs),
        ...     optimizer=optax.adamw(3e-4),
        ...     loss=loss,
        ...     data=examples,
        ...     batch_size=256,
        ...     microbatch_size=32,
        ... )  # doctest: +SKIP
        >>> result = trainer.fit(1000)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        model: object,
        optimizer: optax.GradientTransformation,
        loss_fn: Callable[..., Any],
        data: Any,  # noqa: ANN401 - four kinds of sources
        batch_size: int,
        microbatch_size: int,
        seed: int = 0,
        numerics: Numerics = Numerics(),  # noqa: B008 - frozen
        parallelism: Parallelism = Parallelism(),  # noqa: B008 - frozen
        planner: Planner | None = None,
        read_options: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
        evaluation: Evaluation | None = None,
        early_stopping: EarlyStopping | None = None,
        checkpoints: Checkpoints | None = None,
        callbacks: Sequence[Callback] = (),
        log_directory: str | Path | None = None,
    ) -> None:
        """Checks what can be checked without a device.

        Args:
            model: a function with a parameter `rngs` that makes an `nnx.Module`, a `flax.linen.Module`, or a function
                `init(key)` that makes a tree of arrays.
            optimizer: any Optax transformation, with its learning-rate schedule in it: it is updated once a step.
            loss: `loss(model, batch)` or `loss(model, batch, key)`; gives the mean over the batch, or that and a
                dict of scalars. `model` is the `nnx` module, the bound Linen module, or the tree of arrays.
            data: a source of examples, a Grain `MapDataset`, or a function `batch(step, index)` that gives a
                microbatch.
            batch_size: examples in a step, whoever lives.
            microbatch_size: examples that one replica computes at a time; a multiple of its devices.
            seed: of the first weights, the shuffle and all keys.
            numerics: precision, clipping, rematerialisation, and what to do about numbers that are not finite.
            sharing: how microbatches are shared out over hosts and added up, and how the state is kept between steps.
            planning: search the fastest plan for the live hosts in every generation; None: replicas as in `sharing`.
            reading: how the data is read.
            evaluation: on other data, now and then.
            early_stop: when the evaluation gets no better.
            checkpoints: on storage, to go on from in another job.
            callbacks: called on every host after each step; see `StepReport` and `Callback`.
            log: a directory; each host appends JSON lines to `<host>.jsonl` in it.

        Raises:
            CallerError: an argument is wrong.
        """
        check_integers(batch_size=batch_size, microbatch_size=microbatch_size, seed=seed)
        microbatches, rest = divmod(batch_size, microbatch_size) if microbatch_size > 0 else (0, 0)
        if rest or microbatches < 1:
            raise CallerError(
                f"batch_size: found {batch_size} with microbatch_size {microbatch_size}, expected a positive multiple "
                "of it: a step is a whole number of microbatches. Change one of them"
            )
        if not 0 <= seed < MAX_SEED:
            raise CallerError(f"seed: found {seed}, expected a number from 0 to 2**32 - 1")
        if early_stopping is not None:
            _check_early_stop(early_stopping, evaluation)
        if planner is not None:
            _check_planning(parallelism)
        training_loss = adapt_loss(loss_fn)
        evaluation_loss = evaluation.loss_fn if evaluation is not None else None
        self._evaluation_loss = training_loss if evaluation_loss is None else adapt_loss(evaluation_loss)
        self._recipe = Recipe(
            model=adapt_model(model),
            optimizer=check_optimizer(optimizer),
            loss_fn=training_loss,
            num_microbatches=microbatches,
            seed=seed,
            numerics=numerics,
            early_stopping=early_stopping.make_initial_state() if early_stopping is not None else (),
        )
        self._data = make_microbatch_data(
            data,
            num_microbatches=microbatches,
            microbatch_size=microbatch_size,
            seed=seed,
            shuffle=read_options.shuffle,
        )
        self._microbatch_size = microbatch_size
        self._sharing, self._planning, self._reading = parallelism, planner, read_options
        self._model = model
        self._evaluation, self._early_stop, self._checkpoints = evaluation, early_stopping, checkpoints
        self._callbacks, self._log = tuple(callbacks), log_directory

    def fit(self, num_steps: int) -> FitResult:
        """Trains until `steps` steps are committed, counted from the beginning, also of an earlier job's checkpoint.

        Under an agent it returns when the job is done; without one it trains on this machine alone. A worker that was
        started again, and was ready only when the others had finished, ends here.

        Raises:
            CallerError: what the model, loss or data give is not as expected.
            NonFiniteError: a microbatch is not finite, and the policy is to stop.
            Exception: whatever the loss, the data or a callback raise, unchanged.
        """
        check_integers(num_steps=num_steps)
        if num_steps < 0:
            raise CallerError(f"num_steps: found {num_steps}, expected 0 or more")
        order = FitConfig(
            num_steps=num_steps,
            recipe=self._recipe,
            microbatch_size=self._microbatch_size,
            data=self._data,
            model=self._model,
            parallelism=self._sharing,
            planner=self._planning,
            read_options=self._reading,
            evaluation=self._evaluation,
            evaluation_loss=self._evaluation_loss,
            early_stopping=self._early_stop,
            checkpoints=self._checkpoints,
            callbacks=self._callbacks,
            log_directory=self._log,
        )
        fitting = FitLoop(order, ProgressBar(num_steps) if is_progress_wanted() else None)
        try:
            run(
                fitting.run_generation,
                find_latest_checkpoint=fitting.find_newest_checkpoint
                if self._checkpoints is not None
                else None,
            )
        finally:
            fitting.close()
        if fitting.result is None:
            # This worker came (back) when the others had finished: it has no weights, and nothing is left to do.
            raise SystemExit(0)
        return fitting.result


def _check_planning(sharing: Parallelism) -> None:
    if sharing.replica_shape != ONE_REPLICA_PER_HOST or sharing.state != StateSharding.REPLICATED:
        raise CallerError(
            f"planning: found Sharing(replicas={sharing.replica_shape}, state={sharing.state!r}), expected neither to "
            "be given: the plan says how many replicas a host has, and each host keeps the whole state, cut over its "
            "devices. For a state that is cut over hosts leave planning out, or call rj.compile_plan in a loop"
        )


def _check_early_stop(early_stop: EarlyStopping, evaluation: Evaluation | None) -> None:
    if evaluation is None:
        raise CallerError("early_stop: found no evaluation, expected one: Evaluation(data=..., every=...)")
    if not early_stop.metric.startswith(EVALUATION_PREFIX):
        raise CallerError(
            f"early_stop: found the metric {early_stop.metric!r}, expected one of the evaluation, such as 'eval_loss'"
        )
