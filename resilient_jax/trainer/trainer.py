"""`Trainer`: the model, loss and data of a Flax or Optax user in a training loop that survives failures."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optax
from flax import nnx

from resilient_jax.argument_checks import refuse_unknown_options
from resilient_jax.data.microbatch_rows import check_integers
from resilient_jax.data.microbatches import make_microbatch_data
from resilient_jax.errors import CallerError
from resilient_jax.planning.plan import Plan
from resilient_jax.sharding.stage_sharding import STAGE_AXES
from resilient_jax.step.assignment import DATA_AXIS
from resilient_jax.trainer.arrangement import REPLICA_AXES
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.early_stopping import EarlyStopping
from resilient_jax.trainer.evaluation import Evaluation
from resilient_jax.trainer.fit_config import FitConfig, Parallelism, ReadOptions, StateSharding
from resilient_jax.trainer.fit_loop import FitLoop
from resilient_jax.trainer.fit_result import FitResult
from resilient_jax.trainer.initial_variables import check_initial_variables
from resilient_jax.trainer.loss_function import EVALUATION_PREFIX, LossFunction, adapt_loss
from resilient_jax.trainer.model_adapters import adapt_model
from resilient_jax.trainer.numerics import Numerics
from resilient_jax.trainer.option_groups import check_callbacks, check_log_directory, check_option_groups
from resilient_jax.trainer.parameter_ema import track_ema
from resilient_jax.trainer.planned_pipeline import PlannedPipeline, compile_pipeline
from resilient_jax.trainer.planner import Planner
from resilient_jax.trainer.progress_bar import open_progress
from resilient_jax.trainer.step_report import Callback
from resilient_jax.trainer.train_step import Recipe, check_optimizer
from resilient_jax.trainer.trainer_step import TrainerStep, check_own_loop
from resilient_jax.trainer.variable_reductions import check_rules
from resilient_jax.worker.run import run
from resilient_jax.worker.world import ONE_REPLICA_PER_HOST, World

MAX_SEED = 2**32
"""Seeds are 32 bits wide wherever they go: JAX's keys, the shuffle."""


@refuse_unknown_options
class Trainer:
    """Trains a model on hosts any of which may die, with the same batches in the same order as if none had.

    A step is the mean over B = batch_size / microbatch_size microbatches, each computed by one replica. With
    exact sums, the default, the weights are bit for bit those of a run without failures. The guarantee ends where the
    model, the loss or the data are not pure functions of their arguments.

    Constructing a trainer touches no device: models are given as functions, which `fit` calls.

    Example:
        >>> import resilient_jax as rj
        >>> def loss_fn(model, batch):
        ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> trainer = rj.Trainer(
        ...     model=lambda rngs: Net(rngs),
        ...     optimizer=optax.adamw(3e-4),
        ...     loss_fn=loss_fn,
        ...     data=examples,
        ...     batch_size=256,
        ...     microbatch_size=32,
        ... )  # doctest: +SKIP
        >>> result = trainer.fit(1000)  # doctest: +SKIP

    Args:
        model: a function with a parameter `rngs` that makes an `nnx.Module`, a `flax.linen.Module`, or a function
            `init(key)` that makes a tree of arrays.
        optimizer: any Optax transformation, with its learning-rate schedule in it: it is updated once a step.
        loss_fn: `loss_fn(model, batch)` or `loss_fn(model, batch, key)`; returns the mean over the batch, or that mean
            and a dict of scalars. `model` is the `nnx` module, the bound Linen module, or the tree of arrays. The key
            is a new one for each microbatch; it may also be called `rng` or `dropout_rng`, and under the name `rngs`
            it is an `nnx.Rngs`. A step is the mean over its microbatches: with a loss that divides by the tokens of
            its batch every microbatch has the same weight, however many tokens it has. A `WeightedMean`, in place of
            the mean or of a scalar in the dict, is divided once, by the weight of all microbatches of the step.
        data: arrays whose first dimension is the number of examples, such as `(images, labels)` or a dict of them; a
            source of examples, with `len()` and `[]`; a Grain `MapDataset`; or a function `batch(step, index)` that
            returns a microbatch. See `make_microbatch_data`.
        batch_size: examples in a step, however many hosts are alive.
        microbatch_size: examples that one replica computes at a time; a multiple of its devices.
        seed: the seed of the initial weights, the shuffle and all keys.
        wrt: selects the parameters that are trained, as that of `nnx.Optimizer`, such as
            `nnx.All(nnx.Param, nnx.PathContains("head"))`; of any model also a function `(path, value) -> bool`. The
            others are frozen: without gradients, and not in the optimizer's state.
        initial_variables: a function without parameters that returns variables with which a job begins, such as
            pretrained weights, as a tree of arrays with the paths of the model; others keep their initial values. It is
            called on every host, and not when a checkpoint is resumed.
        variable_reductions: what becomes of variables that the loss changes, by Linen collection or NNX type: "mean"
            over the step's microbatches, "first" microbatch, "sum" of the changes, "discard", or a function
            (old, mean). By default batch statistics are averaged, and changes of other variables are refused.
        numerics: precision, clipping, rematerialization, the policy for non-finite microbatches, and an average of the
            parameters.
        parallelism: how microbatches are assigned to hosts and reduced, and how the state is sharded between steps.
        planner: searches the fastest plan for the live hosts in every generation; None: replicas as in `parallelism`.
        read_options: how the data is read.
        evaluation: what to evaluate, and how often; None: nothing.
        early_stopping: ends training when the evaluation does not improve.
        checkpoints: when to save the state on storage, from where another job resumes; None: never.
        callbacks: called on every host after each step; see `StepReport` and `Callback`.
        log_directory: each host appends JSON lines to `<host>.jsonl` in this directory, which is created where it is
            missing; None: no log.

    Raises:
        CallerError: an argument is wrong.
    """

    def __init__(
        self,
        *,
        model: object,
        optimizer: optax.GradientTransformation,
        loss_fn: Callable[..., Any],
        data: Any,  # noqa: ANN401 - five kinds of sources
        batch_size: int,
        microbatch_size: int,
        seed: int = 0,
        wrt: Any = nnx.Param,  # noqa: ANN401 - whatever nnx takes for a filter
        initial_variables: Callable[[], Any] | None = None,
        variable_reductions: Mapping[Any, Any] = MappingProxyType({}),
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
        """Check what can be checked without a device."""
        check_option_groups(numerics=numerics, parallelism=parallelism, planner=planner)
        check_option_groups(evaluation=evaluation, early_stopping=early_stopping, checkpoints=checkpoints)
        check_option_groups(read_options=read_options)
        check_callbacks(callbacks)
        log_directory = check_log_directory(log_directory)
        num_microbatches = _count_microbatches(batch_size, microbatch_size)
        _check_seed(seed)
        _check_planner(planner, parallelism, wrt)
        _check_evaluation(evaluation, early_stopping, numerics)
        sizes = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
        self._config = FitConfig(
            num_steps=0,
            recipe=Recipe(
                model=adapt_model(model, wrt),
                optimizer=track_ema(check_optimizer(optimizer), numerics.ema_decay),
                loss_fn=adapt_loss(loss_fn),
                num_microbatches=num_microbatches,
                seed=seed,
                numerics=numerics,
                early_stopping=early_stopping.make_initial_state() if early_stopping is not None else (),
                variable_rules=check_rules(variable_reductions),
                axis_names=_name_axes(planner, parallelism),
            ),
            microbatch_size=microbatch_size,
            data=make_microbatch_data(data, **sizes, seed=seed, shuffle=read_options.shuffle),
            initial_variables=check_initial_variables(initial_variables),
            model=model,
            parallelism=parallelism,
            planner=planner,
            read_options=read_options,
            evaluation=evaluation,
            evaluation_loss=_adapt_evaluation_loss(evaluation, loss_fn, microbatch_size, seed),
            early_stopping=early_stopping,
            checkpoints=checkpoints,
            callbacks=tuple(callbacks),
            log_directory=log_directory,
        )

    def fit(self, num_steps: int) -> FitResult:
        """Train until `num_steps` steps are committed, counted from the beginning, also of a resumed job.

        Under an agent, return when the job is done; without an agent, train on this machine alone. A worker that was
        restarted, and was ready only when the others had finished, exits here.

        Raises:
            CallerError: the result of the model, the loss or the data is not as expected.
            NonFiniteError: a microbatch is not finite, and the policy is to stop.
            Exception: an exception of the loss, the data or a callback, unchanged.
        """
        check_integers(num_steps=num_steps)
        if num_steps < 0:
            raise CallerError(f"num_steps: found {num_steps}, expected 0 or more")
        loop = FitLoop(
            dataclasses.replace(self._config, num_steps=num_steps),
            open_progress(num_steps),
        )
        self._run_loop(loop, loop.run_generation)
        if loop.result is None:
            # This worker was ready after the others had finished: it has no weights, and nothing is left to do.
            raise SystemExit(0)
        return loop.result

    def run(self, train: Callable[[World, TrainerStep], None]) -> None:
        """Run a loop of your own with the steps of this trainer, on all hosts, as `rj.run` does; also of a pipeline.

        `train(world, train_step)` is called in every generation, and returns when training is over. `fit` is not
        called.

        Example:
            >>> def train(world, train_step):
            ...     state = train_step.restore_or_init()
            ...     for step in world.steps(1000):
            ...         state, metrics = train_step(state, step)
            ...         world.commit(state, **metrics)
            ...         train_step.save(state)
            >>> trainer.run(train)  # doctest: +SKIP

        Raises:
            CallerError: the trainer has options that only `fit` follows; or as `fit`.
            Exception: an exception of `train`, the loss or the data, unchanged.
        """
        check_own_loop(self._config)
        loop = FitLoop(self._config, None)
        self._run_loop(
            loop, lambda world: loop.run_own(world, lambda: train(world, TrainerStep(world, loop)))
        )

    def compile_plan(
        self, plan: Plan, *, devices: Sequence[Any], donate_state: bool = True
    ) -> PlannedPipeline:
        """Return the steps of this trainer by a plan, also with a pipeline, on devices of this process.

        Model, loss, optimizer and numerics are the trainer's; the plan says batch size, axes, layers of each stage and
        whether layers are recomputed. Nothing is read from the trainer's data but the shapes of a microbatch, and no
        failure is survived: for that use `run`.

        Example:
            >>> program = trainer.compile_plan(plan, devices=jax.devices())  # doctest: +SKIP
            >>> state = program.init()  # doctest: +SKIP
            >>> for batch in batches:  # doctest: +SKIP
            ...     state, metrics = program(state, batch)

        Args:
            plan: plan from `rj.planning.search_plan`, with any number of stages.
            devices: all devices of the topology, host by host in the topology's order; the plan leaves out its spares.
            donate_state: whether a step takes the memory of the state that it is given, as `jax.jit(donate_argnums=0)`
                does. False: a state can be used again after a step, and a device has two of its own part while it is
                updated.

        Raises:
            CallerError: the plan is for another model, batch or number of devices, or has what a pipeline does not.
        """
        return compile_pipeline(plan, self._config, devices, donate_state=donate_state)

    def _run_loop(self, loop: FitLoop, run_generation: Callable[[World], None]) -> None:
        find_checkpoint = loop.find_newest_checkpoint if self._config.checkpoints is not None else None
        try:
            run(run_generation, find_latest_checkpoint=find_checkpoint)
        finally:
            loop.close()


def _name_axes(planner: Planner | None, parallelism: Parallelism) -> tuple[str, ...]:
    """Return the axes of the mesh of a replica, in every generation."""
    if parallelism.pipeline is not None:
        return STAGE_AXES
    if planner is not None or parallelism.axes is not None:
        return tuple(axis.value for axis in REPLICA_AXES)
    return tuple(name for name, _ in parallelism.replica_shape.axes) or (DATA_AXIS,)


def _count_microbatches(batch_size: int, microbatch_size: int) -> int:
    """Return how many microbatches a step has."""
    check_integers(batch_size=batch_size, microbatch_size=microbatch_size)
    num_microbatches, rest = divmod(batch_size, microbatch_size) if microbatch_size > 0 else (0, 0)
    if rest or num_microbatches < 1:
        raise CallerError(
            f"batch_size: found {batch_size} with microbatch_size {microbatch_size}, expected a positive multiple of "
            "it: a step has an integer number of microbatches. Change one of them"
        )
    return num_microbatches


def _adapt_evaluation_loss(
    evaluation: Evaluation | None, loss_fn: Callable[..., Any], microbatch_size: int, seed: int
) -> LossFunction:
    """Return the loss function of the evaluation; its data is refused now, not in a running job."""
    if evaluation is None:
        return adapt_loss(loss_fn)
    evaluation.make_data(evaluation.microbatch_size or microbatch_size, seed)
    return adapt_loss(loss_fn if evaluation.loss_fn is None else evaluation.loss_fn)


def _check_seed(seed: int) -> None:
    check_integers(seed=seed)
    if not 0 <= seed < MAX_SEED:
        raise CallerError(f"seed: found {seed}, expected an integer from 0 to 2**32 - 1")


def _check_planner(
    planner: Planner | None,
    parallelism: Parallelism,
    wrt: Any,  # noqa: ANN401 - a filter
) -> None:
    if planner is not None and parallelism.axes is not None:
        raise CallerError(
            f"planner: found it with parallelism axes={dict(parallelism.axes)}, expected one of the two: the planner "
            "chooses the axes"
        )
    if planner is not None and wrt is not nnx.Param:
        raise CallerError(
            "wrt: found a filter of parameters together with planner, expected one of them: planning is for models "
            "that are trained as a whole. Leave the other out, or freeze parameters in the optimizer: "
            "optax.multi_transform with optax.set_to_zero"
        )
    pipeline = parallelism.pipeline
    if planner is not None and planner.spans_hosts and (pipeline is not None or planner.axes_by_host):
        raise CallerError(
            "planner: found spans_hosts=True with a pipeline or axes_by_host=True, expected it alone: a pipeline says "
            "which hosts make a replica, and hosts of one replica have the same axes. Leave one out"
        )
    if planner is not None and pipeline is not None and (pipeline.axis_sizes or pipeline.logical_axis_rules):
        raise CallerError(
            "planner: found rj.Pipeline(axis_sizes=) or rj.Pipeline(logical_axis_rules=) with it, expected neither: "
            "the planner chooses the axes of the devices of a host. Give them to rj.Planner"
        )
    is_default = parallelism.replica_shape == ONE_REPLICA_PER_HOST
    if planner is not None and not (is_default and parallelism.state == StateSharding.REPLICATED):
        raise CallerError(
            f"planner: found Parallelism(replica_shape={parallelism.replica_shape}, state={parallelism.state!r}), "
            "expected neither to be given: the plan sets how many replicas a host has, or a replica hosts, and each "
            "replica keeps one copy of the state, sharded over its devices. For a state that is sharded over all hosts "
            "leave planner out"
        )


def _check_evaluation(
    evaluation: Evaluation | None, early_stopping: EarlyStopping | None, numerics: Numerics
) -> None:
    if evaluation is not None and evaluation.use_ema and numerics.ema_decay is None:
        raise CallerError(
            "evaluation: found use_ema=True without an average of the parameters, expected one: "
            "Trainer(numerics=rj.Numerics(ema_decay=0.999))"
        )
    if early_stopping is None:
        return
    if evaluation is None:
        raise CallerError(
            "early_stopping: found no evaluation, expected one: Evaluation(data=..., interval_steps=...)"
        )
    if not early_stopping.metric.startswith(EVALUATION_PREFIX):
        raise CallerError(
            f"early_stopping: found the metric {early_stopping.metric!r}, expected one of the evaluation, such as "
            "'eval_loss'"
        )
