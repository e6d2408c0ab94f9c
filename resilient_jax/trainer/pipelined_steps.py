"""The steps of a model that is split over hosts: blocks, mail, state and the step under way, which outlive generations.

placement of the generation -> the state: units that hosts have kept and send each other, or a snapshot, or new
-> who has done what of the step under way? -> tasks -> sums -> update
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import jax
import msgspec
import numpy as np

from resilient_jax.data.microbatch_rows import ALL_ROWS
from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.errors import CallerError
from resilient_jax.events import EventKind
from resilient_jax.host_exchange import CollectiveExchange, gather_mail_addresses
from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.failures import ServiceEnded
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.pipeline.block_state import UnitState
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.pipeline_step import PipelineGeneration, PipelineWorker
from resilient_jax.pipeline.stage_runner import LOSS
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline.step_progress import PROGRESS_STEP
from resilient_jax.pipeline.sum_pieces import list_scalar_results
from resilient_jax.pipeline.unit_exchange import exchange_units
from resilient_jax.pipeline_schedule.routes import list_microbatches
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, Task, TaskKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.step.assignment import ReplicaShape
from resilient_jax.step.random_keys import make_microbatch_id, make_microbatch_key
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.trainer.block_prefetch import BlockPrefetch
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.nonfinite import check_table
from resilient_jax.trainer.pipeline_options import Pipeline
from resilient_jax.trainer.pipelined_loss import (
    cut_training_loss,
    estimate_block_costs,
    make_pipeline_config,
)
from resilient_jax.trainer.stage_axes import FewerDevices, StageAxes
from resilient_jax.trainer.stage_watch import StageWatch
from resilient_jax.trainer.train_step import Recipe, TrainStep
from resilient_jax.trainer.training_state import TrainingState, Tree
from resilient_jax.trainer.unit_placement import UnitPlacement
from resilient_jax.trainer.unit_states import PipelinedState, UnitStates
from resilient_jax.transport.mail_protocol import MailKind
from resilient_jax.worker.committed_state import KeptArrays
from resilient_jax.worker.world import World

HOST_NUMBERS_MAIL: Final = MailKind("host_numbers")
"""Small arrays of a host that are added up over all, in a world that can form no collective."""

MIN_MEASURED_BYTES = 2**20
"""With fewer bytes the time is that of messages."""
FAILPOINTS = {
    TaskKind.FORWARD: FailPoint.BEFORE_MICROBATCH,
    TaskKind.BACKWARD: FailPoint.BEFORE_INPUT_GRADIENT,
    TaskKind.INPUT_GRADIENT: FailPoint.BEFORE_INPUT_GRADIENT,
    TaskKind.WEIGHT_GRADIENT: FailPoint.BEFORE_WEIGHT_GRADIENT,
}


class PipelinedSteps(KeptArrays):
    """The pipeline of this host for one `fit`.

    Attributes:
        abstract_state: shapes of the state of the whole model.
        sharding: sharding over the devices of this host, without devices.
    """

    def __init__(
        self,
        config: FitConfig,
        programs: TrainStep,
        data: Prefetcher,
        axes: StageAxes,
        devices: Sequence[Device],
        why_equal_axes: str,
    ) -> None:
        """Cut the model, without an array.

        Args:
            devices: devices of this host; only their number and kind count.
            why_equal_axes: why all hosts must have as many devices, in words; "": hosts may differ.

        Raises:
            CallerError: the model, its optimizer or an option does not fit a pipeline; the message says what stands in
                the way.
        """
        options = config.parallelism.pipeline
        assert options is not None
        self.options: Pipeline = options
        self._recipe = config.recipe
        self._balance_by_speed = config.parallelism.balance_by_speed
        self._num_shared_examples, self._why_equal_axes = config.num_shared_examples, why_equal_axes
        self._data = data
        used = devices[: math.prod(axes.sizes.values())]
        self.cut, self.sharding = cut_training_loss(
            config, programs, axes.sizes, used, may_replicate=axes.may_replicate
        )
        self._config = make_pipeline_config(config, programs, self.cut)
        self._costs = estimate_block_costs(self.cut)
        self._worker: PipelineWorker | None = None
        self._placement: UnitPlacement | None = None
        self._watch: StageWatch | None = None
        self.abstract_state = programs.abstract_state
        self._units = UnitStates(
            list_state_units(self.cut, self._config.params),
            config.recipe.optimizer,
            self.abstract_state.variables,
            self.abstract_state.opt_state,
        )
        self._early_stopping: dict[int, Tree] = {}
        """Its state, which every host has, in the state of a step: the committed one, and the next."""
        self._bytes_per_s = options.state_bytes_per_s
        self._addresses = _MailAddresses()
        self._num_exchanges = 0
        """How often the hosts of this generation have sent each other units."""
        self._has_agreed = self._has_resumed = False
        """Whether the hosts of this generation have told each other what they have done of the step under way, and
        gone on with it."""
        self._prefetch = BlockPrefetch()
        self._make_key = jax.jit(functools.partial(make_microbatch_key, config.recipe.seed))

    # A generation.

    def enter(self, world: World, shape: ReplicaShape) -> UnitPlacement:
        """Return where the units are on the live hosts, whose devices have the axes of `shape`."""
        worker = self._open_worker(world)
        units = self._units
        placement = UnitPlacement(
            world,
            units,
            self.sharding,
            self._costs,
            self.options.num_stages,
            self._recipe.num_microbatches,
            shape,
        )
        self._placement, self._num_exchanges = placement, 0
        self._has_agreed = self._has_resumed = False
        world.step_services.register_kept(self)
        if world.is_rehearsal:
            return placement
        # Before the first collective: until then no host begins the generation's mail, with which that of copies ends.
        # Without collectives a host may begin it sooner; a copy that lacks sums because of that is given up.
        self._prefetch.take(placement, worker, units.abstract)
        addresses = self._addresses.learn(world, worker.service.address)
        worker.enter(
            PipelineGeneration(
                number=world.generation,
                hosts=tuple(sorted(world.hosts)),
                holders=placement.holders,
                addresses=addresses,
                sharding=placement.sharding,
                throttle=world.step_services.throttle,
            )
        )
        if (sums := world.step_services.mail_sums) is not None:
            # Not of the step under way: hosts may be in different ones.
            mail = dataclasses.replace(worker.make_mail(), step=PROGRESS_STEP)
            sums.exchange = mail.make_exchange(world.hosts, world.host, HOST_NUMBERS_MAIL)
        self._prefetch.enter(placement, worker, units.abstract)
        schedule = PipelineSchedule(self.options.schedule)
        self._watch = StageWatch(
            placement,
            worker,
            self._data,
            schedule,
            balance_by_speed=self._balance_by_speed,
            block_bytes=units.list_block_bytes(len(self._costs)),
            bytes_per_s=self._bytes_per_s,
            fewer_devices=FewerDevices(
                dict(shape.axes or shape.axes_by_devices[-1][1]),
                self._num_shared_examples,
                self._why_equal_axes,
            ),
        )
        world.record_event(
            EventKind.PIPELINE_FORMED,
            replicas=len(placement.teams),
            blocks=len(self._costs),
            cut=placement.describe(),
        )
        return placement

    def restore(self, placement: UnitPlacement, init: Any, load: Any) -> PipelinedState:  # noqa: ANN401 - see below
        """Return the state to go on with; see `StateLayout.restore`."""
        world = placement.world
        if world.step_services.must_resume_from_parts:
            with worker_activity.task(WorkerTask.RESTORE):
                return self._restore_from_parts(placement)
        if world.is_fresh and (found := load(placement.place_whole)) is not None:
            state = placement.split(found)
        else:
            state = world.restore_or_init(lambda: placement.init_state(init), sharding=placement)
        if not world.is_rehearsal:
            step = int(state.step)
            self._require_worker().replace_state(step, placement.read_held(state))
            self._early_stopping = {step: placement.read_local(state.early_stopping)}
        return state

    def _restore_from_parts(self, placement: UnitPlacement) -> PipelinedState:
        """Return the state that the hosts have kept; units that this host is to hold, and has not, come from others."""
        worker, world, shapes = self._require_worker(), placement.world, self._units.abstract
        started_s = time.monotonic()
        step = self._agree(worker)
        world.step_services.hit_failpoint(FailPoint.DURING_RESTORE, step=step)
        # Every host has that of early stopping, as if it were a unit that all of them hold.
        common = len(shapes)
        kept = {**worker.state.all_states, common: self._early_stopping.get(step)}
        found = self._exchange(
            [*worker.unit_holders, worker.lasting_hosts],
            {host: {*units, common} for host, units in placement.list_units_by_host().items()},
            kept,
            [*shapes, self.abstract_state.early_stopping],
        )
        received = {
            number: tree for number, tree in found.items() if number not in kept or tree is not kept[number]
        }
        for number, tree in received.items():
            is_unit = number != common and bool(jax.tree.leaves(tree))
            found[number] = placement.place_unit(number, tree) if is_unit else tree
        self._early_stopping = {step: found.pop(common)}
        worker.state.hold(found)
        early_stopping = jax.tree.map(placement.replicate, self._early_stopping[step])
        state = placement.make_state(step, worker.state.states, early_stopping)
        world.step_services.resume_from_parts(step, state)
        nbytes, seconds = sum(leaf.nbytes for leaf in jax.tree.leaves(received)), time.monotonic() - started_s
        if nbytes >= MIN_MEASURED_BYTES:
            self._bytes_per_s = nbytes / seconds
        world.record_event(
            EventKind.PIPELINE_STATE_KEPT,
            step=step,
            received=nbytes,
            copied=self._prefetch.bytes_taken,
            seconds=seconds,
        )
        return state

    # A step.

    def step(self, state: PipelinedState, step: int) -> tuple[PipelinedState, dict[str, float]]:
        """Return the next state and the metrics; in a rehearsal zeros. The state is donated, once all sums are there.

        Raises:
            CallerError: the state is not that after `step` steps.
            NonFiniteError: the loss or a gradient is not finite, and the policy is to stop.
            PeerUnreachable: a host is lost, or late; what is done of the step is kept for the next generation.
        """
        worker, placement = self._require_worker(), self._require_placement()
        world = placement.world
        if world.is_rehearsal:
            rehearsed = self._rehearse(placement, state)
            return rehearsed, dict.fromkeys([*list_scalar_results(self.cut), LOSS, "grad_norm"], 0.0)
        if (found := int(state.step)) != step:
            raise CallerError(
                f"step {step}: found a state after {found} steps, expected the one after {step}: what the step before "
                "returned, or restore_or_init. A step donates the state that it is given"
            )
        watch = self._watch
        assert watch is not None, "enter comes first"
        with worker_activity.task(WorkerTask.SUM):  # it may wait for other hosts
            watch.begin_step(step)
        _expect_data(self._data, placement, step)
        before = functools.partial(_before_task, world)
        # As it is now: an evaluation may have changed it since the state was committed.
        self._early_stopping[step + 1] = placement.read_local(state.early_stopping)
        if self._has_resumed:
            worker.begin_step(placement.routes, before)
        else:
            self._resume(worker, placement, step, before)
        world.step_services.hit_failpoint(FailPoint.BEFORE_REDUCE)
        told = watch.end_tasks(step)
        with worker_activity.task(WorkerTask.SUM):
            pass_before_update = functools.partial(_pass_before_update, world, self._recipe, step)
            table = worker.finish_step(pass_before_update, told)
        self._early_stopping.pop(step, None)
        new = placement.make_state(step + 1, worker.state.states, state.early_stopping)
        metrics = {name: float(value) for name, value in table.results.items()}
        return new, {**metrics, LOSS: table.loss, "grad_norm": table.norm}

    def _resume(
        self,
        worker: PipelineWorker,
        placement: UnitPlacement,
        step: int,
        before: Any,  # noqa: ANN401 - a function
    ) -> None:
        """Run the first step of a generation: what is done of it, is done."""
        if not self._has_agreed:
            self._agree(worker)
        kept = worker.num_finished_tasks
        started_s = time.monotonic()
        worker.resume_step(placement.routes, before)
        self._has_resumed = True
        if kept:
            placement.world.record_event(
                EventKind.PIPELINE_STEP_RESUMED,
                step=step,
                kept=kept,
                seconds=time.monotonic() - started_s,
            )

    def _agree(self, worker: PipelineWorker) -> int:
        """Return the step in which the hosts go on, when all have said what they have done of it."""
        with worker_activity.task(WorkerTask.SUM):  # a wait for other hosts, as in a sum
            step = worker.agree_on_step()
        self._has_agreed = True
        return step

    def find_stage(self) -> tuple[UnitPlacement, StepMail]:
        """Return where the units are in this generation, and this host's mail of the present state."""
        return self._require_placement(), self._require_worker().make_mail()

    def _read(self, step: int, microbatch: int) -> tuple[Tree, jax.Array]:
        key = self._make_key(make_microbatch_id(step, microbatch)), np.uint32(microbatch)
        return self._require_placement().sharding.place_values((self._data.get(step, microbatch), key))

    # The whole model.

    def gather_state(self, state: PipelinedState) -> TrainingState:
        """Return the state of the whole model in this host's memory. Every host must call this."""
        placement, units = self._require_placement(), self._units
        found: dict[int, UnitState] = self._exchange(
            placement.unit_holders,
            dict.fromkeys(placement.world.hosts, range(len(units.units))),
            placement.read_held(state),
            units.abstract,
        )
        # A barrier: no host leaves before all have what it sent.
        placement.world.all_reduce(np.zeros(1, np.int32))
        placement.world.step_services.offers.withdraw()
        step, early_stopping = placement.read_local((state.step, state.early_stopping))
        # What has arrived is in host memory, and not copied again.
        return units.join(*jax.tree.map(np.asarray, (step, found, early_stopping)))

    def _exchange(
        self,
        holders: Sequence[Collection[HostName]],
        wanted: Mapping[HostName, Collection[int]],
        held: Mapping[int, Any],
        shapes: Sequence[Any],
    ) -> dict[int, Any]:
        """Return the units of the present state that this host wants; see `exchange_units`."""
        self._num_exchanges += 1
        world = self._require_placement().world
        id = SnapshotId(self._require_worker().step, world.generation)
        exchange = world.step_services.make_exchange(id, self._num_exchanges, self._addresses.known)
        with worker_activity.task(WorkerTask.SUM):  # a wait for other hosts
            return exchange_units(exchange, holders, wanted, held, shapes)

    # Between generations.

    @property
    def part(self) -> StatePart | None:
        """The units that this host could give the others, if there are any."""
        kept = self._worker.offered_units if self._worker is not None else ()
        if not kept:
            return None
        part = StatePart.from_units(kept, len(self._units.units))
        if self._placement is None or self._watch is None:
            return part
        generation = self._placement.world.generation
        watch = self._watch
        return msgspec.structs.replace(
            part, generation=generation, losses=watch.losses, outlook=watch.outlook, order=watch.order
        )

    def leave_devices(self, generation: Generation | None) -> None:
        """Copy the units of this host to its memory: the devices are going away, and the others have no other state."""
        self._prefetch.drop()
        if self._worker is not None:
            self._worker.move_to_host()
        self._early_stopping = jax.tree.map(np.array, self._early_stopping)
        self._placement, self._watch = None, None

    def drop(self, *, keeps_copies: bool = False) -> None:
        """Drop every array: the others have another state, or this host leaves them.

        Args:
            keeps_copies: True: copies stay of units that others have.
        """
        if not keeps_copies:
            self._prefetch.drop()
        if self._worker is not None:
            self._worker.drop_state()
        self._placement, self._watch, self._early_stopping = None, None, {}

    def close(self) -> None:
        """End the threads, and keep nothing."""
        if self._worker is not None:
            self._worker.close()
            self.drop()

    def _open_worker(self, world: World) -> PipelineWorker:
        if self._worker is None:
            config = dataclasses.replace(self._config, wait_timeout_s=world.step_services.wait_timeout_s)
            self._worker = PipelineWorker(
                world.host,
                self.cut,
                self._recipe.optimizer,
                config,
                world.step_services.open_mail(),
                self._read,
                lambda: self._require_placement().world.raise_if_ended(),
            )
            self._worker.before_donation = functools.partial(
                _begin_donation, self._prefetch, self._require_placement
            )
            self._worker.state.after_unit = lambda number: (
                self._require_placement().world.step_services.hit_failpoint(FailPoint.DURING_UPDATE, number)
            )
        return self._worker

    def _rehearse(self, placement: UnitPlacement, state: PipelinedState) -> PipelinedState:
        """Run one block of each kind, and the updates of this host's units, on zeros; return the updated state."""
        worker = self._require_worker()
        worker.replace_state(worker.step, placement.read_held(state))
        try:
            worker.rehearse(placement.sharding)
            found = placement.make_state(int(state.step), worker.state.states, state.early_stopping)
        finally:
            worker.drop_state()  # it is no part of the job's state
        self._prefetch.begin(placement, worker, self._units.abstract)
        return found

    def _require_worker(self) -> PipelineWorker:
        assert self._worker is not None, "enter comes first"
        return self._worker

    def _require_placement(self) -> UnitPlacement:
        assert self._placement is not None, "enter comes first"
        return self._placement


def _expect_data(data: Prefetcher, placement: UnitPlacement, step: int) -> None:
    """Have this host's microbatches of a step, and of the next one, read."""
    mine = list_microbatches(placement.routes, placement.world.host)
    data.expect([(number, index, ALL_ROWS) for number in (step, step + 1) for index in mine])


def _begin_donation(prefetch: BlockPrefetch, get_placement: Callable[[], UnitPlacement]) -> None:
    """Return when no thread reads the units of this host."""
    prefetch.wait_until_packed()
    get_placement().world.step_services.begin_donation()


def _before_task(world: World, task: Task) -> None:
    world.raise_if_ended()
    world.step_services.hit_failpoint(FAILPOINTS[task.kind], task.microbatch)


def _pass_before_update(world: World, recipe: Recipe, step: int, table: CommitTable) -> None:
    world.step_services.hit_failpoint(FailPoint.AFTER_REDUCE)
    check_table(recipe, step, table)


class _MailAddresses:
    """The addresses of the hosts that this one has trained with last."""

    def __init__(self) -> None:
        self.known: dict[HostName, str] = {}

    def learn(self, world: World, own: str) -> dict[HostName, str]:
        """Return the addresses of all live hosts, which they tell each other; every host must call this.

        Args:
            world: world of the generation that begins.
            own: address of this host, which stays the same as long as its worker lives.

        Raises:
            ServiceEnded: an address is not known, and the world can form no clique to ask.
        """
        if world.step_services.mail_sums is None:
            self.known = gather_mail_addresses(CollectiveExchange.between_hosts(world), world.hosts, own)
        elif unknown := sorted(set(world.hosts).difference(self.known)):
            raise ServiceEnded(
                f"pipeline: found no address of {', '.join(unknown)}, expected one of every host: without the "
                "coordination service of their world hosts cannot ask each other. A new world follows"
            )
        return {host: self.known[host] for host in world.hosts}
