"""A plan with a pipeline as a program in one process: each stage of each replica on devices of its own.

Stages are threads that run the tasks, programs and exact sums of `pipeline.pipeline_step`, as the hosts of a trainer
do. What goes from stage to stage goes from devices to devices. So a step has the bits of a trainer's whose stages have
the same axes, whatever the cut, the schedule and the number of replicas.
"""

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.errors import CallerError, PeerUnreachable
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import UnitState, is_spec, make_unit_specs
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.local_mail import LocalMailService, LocalStepMail
from resilient_jax.pipeline.pipeline_step import PipelineGeneration, PipelineWorker
from resilient_jax.pipeline.stage_runner import LOSS, BeforeTask
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline_schedule.routes import Routes, Team, find_holders, list_stages, make_routes
from resilient_jax.pipeline_schedule.tasks import Task
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.plan import Plan
from resilient_jax.sharding.planned_program import make_mesh
from resilient_jax.sharding.stage_sharding import STAGE_AXES, StageSharding, make_stage_mesh
from resilient_jax.step.random_keys import make_microbatch_id, make_microbatch_key
from resilient_jax.trainer.accumulation import make_abstract
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.nonfinite import check_table
from resilient_jax.trainer.pipeline_options import Pipeline
from resilient_jax.trainer.pipelined_loss import cut_training_loss, make_pipeline_config
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.trainer.training_state import Tree
from resilient_jax.trainer.unit_states import PipelinedState, UnitStates
from resilient_jax.transport.mailbox import Mailbox

STAGE_COPIES_AXIS: Final = "copies"
"""Along which the state of shared weights is replicated over stages."""
WAIT_TIMEOUT_S: Final = 3600.0
"""For one value of another stage of this process; the first step of a large model compiles that long at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Devices that compute some blocks of a replica.

    Attributes:
        units: numbers of the units whose state the stage has.
    """

    name: HostName
    sharding: StageSharding
    units: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage did in a step.

    Attributes:
        busy_s: seconds in the stage's tasks, without waits for other stages.
        tasks_end_s: when the last of the stage's tasks ended, in seconds since the step began.
    """

    busy_s: float
    tasks_end_s: float
    task_seconds: Mapping[Task, float]


class PlannedPipeline:
    """The steps of a plan with a pipeline; made by `Trainer.compile_plan`.

    Attributes:
        state_shardings: shardings of a state, for `jax.device_put`: each array is on the devices of its layer's stages
            alone.
        cut: text that says which stage has which blocks, such as `replica-0 0-2 -> 3-5`.
        routes: routes of the microbatches through the stages.
        last_step: what each stage did in the last step, by the stage's name.
    """

    def __init__(
        self,
        plan: Plan,
        config: FitConfig,
        programs: TrainStep,
        devices: Sequence[Any],
        *,
        donate_state: bool = True,
    ) -> None:
        """Cut the model as the plan says; use `Trainer.compile_plan`.

        Raises:
            CallerError: the plan has what a pipeline does not, or was made for another model or batch.
        """
        self.plan = plan
        self._config, self._programs = config, programs
        grids = _list_grids(plan, devices)
        axes = {axis: plan.axis_sizes.get(Axis(axis), 1) for axis in STAGE_AXES if axis in list(Axis)}
        model, sharding = cut_training_loss(config, programs, axes, list(grids[0][0].flat))
        abstract = programs.abstract_state
        units = list_state_units(model, abstract.variables.params)
        self._states = UnitStates(units, config.recipe.optimizer, abstract.variables, abstract.opt_state)
        teams = _make_teams(plan, model)
        self.cut = "; ".join(map(_describe_team, teams))
        self.routes: Routes = make_routes(teams, plan.quotas)
        self._holders = find_holders(teams)
        meshes = {
            name: make_stage_mesh(sharding.mesh, list(grid.flat))
            for team, grid_row in zip(teams, grids, strict=True)
            for (name, _), grid in zip(team, grid_row, strict=True)
        }
        self.stages = tuple(
            Stage(
                name,
                sharding.with_mesh(mesh),
                tuple(n for n, unit in enumerate(units) if name in unit.list_holders(self._holders)),
            )
            for name, mesh in meshes.items()
        )
        self._specs = [
            make_unit_specs(unit, state, sharding)
            for unit, state in zip(units, self._states.abstract, strict=True)
        ]
        self.state_shardings = self._make_state_shardings(meshes, sharding)
        self.last_step: dict[HostName, StageWork] = {}
        self._failed = threading.Event()
        self._generation = 0
        self._workers = self._make_workers(model, donate_state=donate_state)
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self.stages), thread_name_prefix="rj-stage")
        self._make_key = jax.jit(functools.partial(make_microbatch_key, config.recipe.seed))

    # The state.

    def init(self) -> PipelinedState:
        """Return the initial state, that of `Trainer.fit`. No device has more of it than its stage needs."""

        def init_units(numbers: Sequence[int]) -> dict[int, UnitState]:
            variables = self._programs.init().variables
            return {number: self._states.init_unit(number, variables) for number in numbers}

        found: dict[int, UnitState] = {}
        for stage in self.stages:
            missing = [number for number in stage.units if number not in found]
            where = {
                number: jax.tree.map(stage.sharding.place, self._specs[number], is_leaf=is_spec)
                for number in missing
            }
            if missing:
                found |= jax.jit(functools.partial(init_units, missing), out_shardings=where)()
        units = tuple(found[number] for number in range(len(found)))
        state = PipelinedState(np.int32(0), units, ())  # pyright: ignore[reportArgumentType] - as an array on a host
        return jax.device_put(state, self.state_shardings)

    def gather(self, state: PipelinedState) -> tuple[Variables, optax.OptState]:
        """Return variables and optimizer state of the whole model as numpy arrays."""
        step, units = jax.tree.map(np.asarray, (state.step, dict(enumerate(state.units))))
        found = self._states.join(step, units, ())
        return found.variables, found.opt_state

    # A step.

    def __call__(
        self,
        state: PipelinedState,
        batch: Tree,
        *,
        before_task: Callable[[HostName, Task], None] = lambda stage, task: None,
    ) -> tuple[PipelinedState, dict[str, float]]:
        """Return the next state, and the means of loss and metrics.

        Args:
            state: a state with the shardings of `state_shardings`. The state is donated, unless `donate_state=False`: a
                step deletes the arrays of the state when all gradients are summed and checked, unit by unit. Where a
                step raises before that, such as for a bad batch or gradients that are not finite, the state stays as it
                is.
            batch: numpy arrays whose first dim is the examples of the plan's whole batch. Microbatches are consecutive
                rows.
            before_task: called before each task, on the thread of its stage.

        Raises:
            CallerError: the batch has another number of examples.
            NonFiniteError: loss or gradients are not finite, and the policy is to stop.
        """
        step = int(state.step)
        rows = self._check_batch(batch)
        keys = [self._make_key(make_microbatch_id(step, index)) for index in range(len(self.routes))]
        size = self._config.microbatch_size

        def read(stage: Stage, index: int) -> Tree:
            own = jax.tree.map(lambda array: array[index * size : (index + 1) * size], rows)
            return stage.sharding.place_values((own, (keys[index], np.uint32(index))))

        self._begin_step(step, state)
        started_s = time.monotonic()
        running: dict[HostName, concurrent.futures.Future[CommitTable]] = {}
        for stage in self.stages:
            self._reads[stage.name] = functools.partial(read, stage)
            before = functools.partial(before_task, stage.name)
            running[stage.name] = self._threads.submit(self._run_stage, stage, step, before, started_s)
        concurrent.futures.wait(running.values())
        errors = [error for one in running.values() if (error := one.exception()) is not None]
        if errors:
            # The others only say that they were not waited for.
            raise next((error for error in errors if not isinstance(error, PeerUnreachable)), errors[0])
        table = running[self.stages[0].name].result()
        metrics = {**dict(table.results), LOSS: table.loss, "grad_norm": table.norm}
        return self._join_stages(step + 1), metrics

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _run_stage(self, stage: Stage, step: int, before: BeforeTask, started_s: float) -> CommitTable:
        worker = self._workers[stage.name]
        try:
            worker.begin_step(self.routes, before)
            found = worker.timings.list_tasks()
            self.last_step[stage.name] = StageWork(sum(found.values()), time.monotonic() - started_s, found)
            return worker.finish_step(functools.partial(check_table, self._config.recipe, step))
        except BaseException:
            self._failed.set()
            worker.drop_step()
            raise

    def _begin_step(self, step: int, state: PipelinedState) -> None:
        """Begin anew, whatever became of the step before.

        Stages read the state here, one after the other: JAX makes the list of an array's shards when it is first asked
        for, and threads that ask at the same time find shards missing in it, or twice.
        """
        self._failed.clear()
        self._generation += 1
        for stage in self.stages:
            worker = self._workers[stage.name]
            worker.enter(
                PipelineGeneration(
                    number=self._generation,
                    hosts=tuple(sorted(self._workers)),
                    holders=self._holders,
                    addresses={},
                    sharding=stage.sharding,
                )
            )
            worker.replace_state(step, {number: _read(state.units[number], stage) for number in stage.units})

    def _join_stages(self, step: int) -> PipelinedState:
        """Return the state of all stages, whose arrays become those of the result."""

        def join(sharding: NamedSharding, *parts: jax.Array) -> jax.Array:
            shards = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(
                parts[0].shape, sharding, shards, dtype=parts[0].dtype
            )

        units = []
        for number, shardings in enumerate(self.state_shardings.units):
            parts = [
                self._workers[stage.name].state.states[number]
                for stage in self.stages
                if number in stage.units
            ]
            units.append(jax.tree.map(join, shardings, *parts))
        now = jax.device_put(np.int32(step), self.state_shardings.step)
        return PipelinedState(now, tuple(units), ())

    def _check_batch(self, batch: Tree) -> Tree:
        rows = jax.tree.map(np.asarray, batch)
        expected = self.plan.global_batch
        for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
            if leaf.shape[:1] != (expected,):
                raise CallerError(
                    f"batch{jax.tree_util.keystr(path)}: found the shape {leaf.shape}, expected {expected} examples "
                    "along the first dim, the whole batch of the plan"
                )
        return rows

    # What stays the same.

    def _make_state_shardings(
        self, meshes: Mapping[HostName, Mesh], sharding: StageSharding
    ) -> PipelinedState:
        units = []
        for number, specs in enumerate(self._specs):
            devices = [
                list(meshes[stage.name].devices.flat) for stage in self.stages if number in stage.units
            ]
            mesh = _make_joint_mesh(devices, next(iter(meshes.values())))
            units.append(
                jax.tree.map(lambda spec, mesh=mesh: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
            )
        everywhere = _make_joint_mesh(
            [list(mesh.devices.flat) for mesh in meshes.values()], next(iter(meshes.values()))
        )
        step: Any = NamedSharding(everywhere, P())
        return PipelinedState(step, tuple(units), ())

    def _make_workers(self, model: CutModel, *, donate_state: bool) -> dict[HostName, PipelineWorker]:
        recipe = self._config.recipe
        config = dataclasses.replace(
            make_pipeline_config(self._config, self._programs, model),
            log_bytes=0,  # a step that fails is not resumed
            wait_timeout_s=WAIT_TIMEOUT_S,
            step_mail=LocalStepMail,
            donate_state=donate_state,
        )
        boxes = {stage.name: Mailbox() for stage in self.stages}
        self._reads: dict[HostName, Callable[[int], Tree]] = {}
        return {
            stage.name: PipelineWorker(
                stage.name,
                model,
                recipe.optimizer,
                config,
                LocalMailService(stage.name, boxes),
                functools.partial(self._read_microbatch, stage.name),
                self._check_others,
            )
            for stage in self.stages
        }

    def _read_microbatch(self, name: HostName, step: int, index: int) -> Tree:
        return self._reads[name](index)

    def _check_others(self) -> None:
        if self._failed.is_set():
            raise PeerUnreachable("step: another stage of this process has failed")


def compile_pipeline(
    plan: Plan, config: FitConfig, devices: Sequence[Any], *, donate_state: bool
) -> PlannedPipeline:
    """Return the steps of a trainer's recipe by a plan; see `Trainer.compile_plan`.

    Raises:
        CallerError: as `Trainer.compile_plan`.
    """
    found = config.microbatch_size, config.recipe.num_microbatches
    if found != (plan.microbatch_sequences, plan.microbatches):
        raise CallerError(
            f"compile_plan: found a trainer with microbatch_size={found[0]}, batch_size={found[0] * found[1]} and "
            f"a plan for {plan.microbatch_sequences} and {plan.global_batch}, expected the same: give the trainer those"
        )
    recipe, numerics = config.recipe, config.recipe.numerics
    options = config.parallelism.pipeline or Pipeline(num_stages=plan.axis_sizes[Axis.PIPELINE])
    config = dataclasses.replace(
        config,
        recipe=dataclasses.replace(
            recipe,
            numerics=dataclasses.replace(numerics, remat=numerics.remat or plan.microbatch.remat),
            early_stopping=(),
            axis_names=STAGE_AXES,
        ),
        parallelism=dataclasses.replace(config.parallelism, pipeline=options),
    )
    programs = TrainStep(config.recipe, make_abstract(config.data.batch(0, 0)))
    return PlannedPipeline(plan, config, programs, devices, donate_state=donate_state)


def _read(unit: UnitState, stage: Stage) -> UnitState:
    """Return a unit as arrays on the devices of one stage."""
    mesh = stage.sharding.mesh
    assert isinstance(mesh, Mesh)
    places = {device: place for place, device in enumerate(mesh.devices.flat)}

    def read(array: jax.Array) -> jax.Array:
        shards = sorted(
            (shard for shard in array.addressable_shards if shard.device in places),
            key=lambda shard: places[shard.device],
        )
        assert isinstance(array.sharding, NamedSharding)
        return jax.make_array_from_single_device_arrays(
            array.shape,
            stage.sharding.place(array.sharding.spec),
            [shard.data for shard in shards],
            dtype=array.dtype,
        )

    return jax.tree.map(read, unit)


def _list_grids(plan: Plan, devices: Sequence[Any]) -> list[list[np.ndarray]]:
    """Return the devices of each stage of each replica."""
    if (size := plan.axis_sizes[Axis.SEQUENCE]) > 1:
        raise CallerError(
            f"compile_plan: found a plan with sequence {size} ({plan.shape}), expected sequence 1 with a pipeline: "
            "stages share no tokens. Search with axes={Axis.SEQUENCE: 1}"
        )
    if plan.pipeline_repeats > 1:
        raise CallerError(
            f"compile_plan: found a plan with pipeline_repeats={plan.pipeline_repeats}, expected 1: a stage has "
            "consecutive layers. Search with pipeline_repeats=1"
        )
    grid = make_mesh(plan, devices).devices
    return [list(replica) for replica in grid]


def _make_teams(plan: Plan, model: CutModel) -> list[Team]:
    """Return the stages of each replica with their numbers of blocks, as the plan divides the layers.

    Raises:
        CallerError: the plan is for another number of layers.
    """
    cuts = [found.layers for found in plan.replica_classes for _ in range(found.replicas)]
    num_layers = model.num_layers
    # The last block has the loss, where it is none of the layers; the first what comes before them.
    last = int(model.num_blocks > num_layers)
    first = model.num_blocks - num_layers - last
    if (planned := sum(cuts[0])) != num_layers:
        raise CallerError(
            f"compile_plan: found a plan for {planned} layers, expected one for the {num_layers} layers at which this "
            "model is cut. Plan for rj.planning.analyze_program of this model"
        )
    return [
        [
            (
                HostName(f"replica-{replica}/stage-{stage}"),
                count + first * (stage == 0) + last * (stage == len(cut) - 1),
            )
            for stage, count in enumerate(cut)
        ]
        for replica, cut in enumerate(cuts)
    ]


def _make_joint_mesh(devices: Sequence[Sequence[Any]], local: Mesh) -> Mesh:
    """Return the mesh of arrays that these stages have, each all of it, over the devices of all of them.

    Args:
        local: mesh of one stage, whose axes all stages have.
    """
    grid = np.array([list(own) for own in devices]).reshape(len(devices), *local.devices.shape)
    return Mesh(grid, (STAGE_COPIES_AXIS, *map(str, local.axis_names)))


def _describe_team(team: Team) -> str:
    found = [f"{blocks[0]}-{blocks[-1]}" for _, blocks in list_stages([team])]
    return f"{team[0][0].split('/')[0]} {' -> '.join(found)}"
