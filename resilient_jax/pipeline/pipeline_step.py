"""One host's part in the steps of a pipeline: tasks, sums, table, update; and how a step goes on without dead hosts.

    routes, orders (all hosts compute the same) -> StageRunner: tasks, mail -> BlockSums: parts, exchange
    -> commit_table: rows of all hosts -> BlockState: update

The caller decides what happens: `begin_step` and `finish_step` in each step; after a failure `enter` with
the hosts that are left, `agree_on_step` and `resume_step`. A step waits for others only before its update.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.blocks.model_weights import Weight
from resilient_jax.errors import PeerUnreachable
from resilient_jax.host_exchange.step_mail import MailCarrier, StepMail
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import BlockState, UnitState, place_sums
from resilient_jax.pipeline.block_sums import BlockSums
from resilient_jax.pipeline.boundary_log import BoundaryLog
from resilient_jax.pipeline.commit_table import CommitTable, make_rows, make_table
from resilient_jax.pipeline.pipeline_config import PipelineConfig
from resilient_jax.pipeline.stage_runner import BeforeTask, StageRunner
from resilient_jax.pipeline.state_units import list_state_units
from resilient_jax.pipeline.step_progress import (
    PROGRESS_STEP,
    TaskProgress,
    catch_up,
    drop_late_copies,
    find_newest_routing,
    plan_continuation,
)
from resilient_jax.pipeline.sum_pieces import StepSums, SumLayout, list_sum_pieces
from resilient_jax.pipeline.task_timings import StageReport
from resilient_jax.pipeline.unit_copies import CommittedStep
from resilient_jax.pipeline_schedule.rerouting import find_living_holders
from resilient_jax.pipeline_schedule.routes import Routes
from resilient_jax.pipeline_schedule.task_orders import BlockSeconds, order_tasks, take_equal_time
from resilient_jax.pipeline_schedule.tasks import KINDS, Task
from resilient_jax.sharding.stage_sharding import StageSharding, make_single_device_stage
from resilient_jax.step.contributions import FIRST_MICROBATCH
from resilient_jax.step.device_throttle import DeviceThrottle
from resilient_jax.transport.mail_protocol import MailKind

ROWS_MAIL: Final = MailKind("rows")
"""What a host says about its sums before it updates its state."""
PROGRESS_MAIL: Final = MailKind("progress")
"""What a host says about its tasks when a step goes on in another generation."""

CLOSE_TIMEOUT_S: Final = 5.0
ReadStep = Callable[[int, int], tuple[Any, Any]]
"""Returns batch and random key of a step and microbatch: a pure function."""
BeforeUpdate = Callable[[CommitTable], None]
Gradients = Mapping[int, Mapping[str, Any]]
"""The gradient sums of the units that a host holds, by number and name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGeneration:
    """The hosts that a step is run by.

    Attributes:
        number: generation of the routes; it only grows.
        hosts: the living hosts, sorted.
        holders: the hosts that have each block; dead hosts may be among them.
        addresses: mailbox address of each living host.
        sharding: layout over the devices of this host, with the axes of the model's abstract mesh; None: its first
            device.
        throttle: makes devices slow that a chaos campaign has slowed down; None: none is.
    """

    number: int
    hosts: tuple[HostName, ...]
    holders: tuple[frozenset[HostName], ...]
    addresses: Mapping[HostName, str]
    sharding: StageSharding | None = None
    throttle: DeviceThrottle | None = None

    @property
    def living_holders(self) -> tuple[frozenset[HostName], ...]:
        """The living hosts that have each block."""
        named = frozenset().union(*self.holders)
        return find_living_holders(self.holders, named.difference(self.hosts))


class PipelineWorker:
    """The pipeline of one host.

    Attributes:
        service: carrier of this host's mail.
        state: weights and optimizer state of the units that this host holds.
        step: number of the next step to be committed.
        unit_holders: the hosts that had each unit when the hosts last agreed on a step.
        timings: what the tasks of this host take.
        received: what has come by mail.
        reports: what all hosts said of their tasks in the last step; empty where they said nothing.
        routed_in: generation whose routes the step under way has; 0: nothing of the step has begun.
        before_donation: called before an update takes the memory of the state; returns when no thread reads that
            memory.
        after_commit: called with each step that was committed, and the sums of this host's units.
        lasting_hosts: hosts that had trained before the hosts last agreed on a step: other hosts have copies of units.
        block_seconds: times by which tasks are put in order, the same on all hosts. A generation begins with equal
            times.
    """

    def __init__(
        self,
        host: HostName,
        cut: CutModel,
        optimizer: optax.GradientTransformation,
        config: PipelineConfig,
        service: MailCarrier,
        read: ReadStep,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create it without state.

        Args:
            cut: the model, the same on all hosts.
            service: carrier of this host's mail; its owner closes it.
            read: reads one microbatch of a step.
            check: raises what ends a wait, such as the end of the generation.
        """
        units = list_state_units(cut, config.params)
        self.step = 0
        self.unit_holders: tuple[frozenset[HostName], ...] = ()
        self.cut = cut
        self.state = BlockState(
            units,
            optimizer,
            cut.sharding,
            config.reduce_variable,
            num_microbatches=config.num_microbatches,
            max_norm=config.max_norm,
            donate=config.donate_state,
        )
        self.host = host
        self.config = config
        self.service = service
        self._read = read
        self._check = check
        self._log = BoundaryLog(config.log_bytes)
        self._sums = BlockSums(host, list_sum_pieces(cut, units), config.num_microbatches, config.reduction)
        self._runner = StageRunner(host, cut, self._log, self._sums)
        self.timings = self._runner.timings
        self.received = service.received
        self.reports: Mapping[HostName, StageReport] = {}
        self.block_seconds: BlockSeconds = take_equal_time
        self._units = units
        self._routes: Routes = ()
        self.routed_in = 0
        self.before_donation: Callable[[], None] = lambda: None
        self.after_commit: Callable[[CommittedStep], None] = lambda committed: None
        self.lasting_hosts: frozenset[HostName] = frozenset()
        self._has_copies = False
        """Whether all that is here are copies, made while others trained."""
        self._gradients: Gradients | None = None
        """The sums of the step, from when they are here until it is committed."""
        self._table: CommitTable | None = None
        self._progress: dict[HostName, TaskProgress] = {}
        self._ordered: tuple[Routes, frozenset[Task], BlockSeconds] | None = None
        self._order: tuple[Task, ...] = ()
        self._generation: PipelineGeneration | None = None
        self._is_on_host = False
        """Whether the state is in host memory, because the devices that it was on are gone."""

    @property
    def num_finished_tasks(self) -> int:
        """How many tasks of the step under way are finished here."""
        return len(self._runner.done)

    def close(self) -> None:
        """End the mail, once the kernel has what was to be sent."""
        with contextlib.suppress(PeerUnreachable):
            self.service.wait_sent(time.monotonic() + CLOSE_TIMEOUT_S)
        self.service.close()

    def enter(self, generation: PipelineGeneration) -> None:
        """Have these hosts from now on; what has been done of a step is kept."""
        self._generation = generation
        sharding = generation.sharding or make_single_device_stage()
        self._runner.throttle = generation.throttle
        self._runner.sharding = self._sums.sharding = sharding
        if self._is_on_host:
            self.state.place(sharding)
            self._runner.place(sharding)
            self._sums.place()
            self._gradients = self._gradients and {
                number: place_sums(self._units[number], sums, sharding)
                for number, sums in self._gradients.items()
            }
            self._is_on_host = False
        # A host that joins knows of no measured ones.
        self.block_seconds, self.reports = take_equal_time, {}
        self.timings.clear()
        self.service.enter(generation.number, generation.addresses)

    def replace_state(self, step: int, states: Mapping[int, UnitState], *, are_copies: bool = False) -> None:
        """Replace the state by that after `step` steps; what was done of another step is dropped.

        Args:
            step: number of the next step to be committed.
            states: unit number to state, for the units that this host is to hold.
            are_copies: whether these were copied while the others trained, and this host knows nothing else of the job.
        """
        self._has_copies = are_copies
        if step != self.step:
            self.step, self._table = step, None
            self.drop_step()
        if self.routed_in:
            self.state.hold(states)  # of the step under way
        else:
            self.state.replace(states)

    @property
    def offered_units(self) -> tuple[int, ...]:
        """The units that this host has, and will have in the step that the hosts agree on."""
        # With all sums here another host may have committed the step; then this one commits it, too.
        return tuple(sorted(self.state.all_states if self._gradients is None else self.state.states))

    def move_to_host(self) -> None:
        """Copy everything to host memory until the next generation begins: the devices are going away.

        What was done of the step is kept, if all of it can be copied.
        """
        if self._is_on_host:  # the next generation ended while its world was formed
            return
        gradients = self._gradients
        if not (self._runner.move_to_host() and self._sums.move_to_host()):
            self.drop_step()
        self._forget_devices()
        self.state.move_to_host()
        self._gradients = jax.tree.map(np.array, gradients)
        self._is_on_host = True

    def drop_state(self) -> None:
        """Drop every array: this host has nothing any more that the others could use."""
        self.step, self._table, self._is_on_host = 0, None, False
        self.drop_step()
        self._forget_devices()
        self.state.replace({})

    def drop_step(self) -> None:
        """Drop all that was done of the step, with every array that it needs."""
        self._routes, self.routed_in, self._gradients = (), 0, None
        self._runner.begin_step()
        self._sums.begin_step(self.step)

    def begin_step(self, routes: Routes, before_task: BeforeTask = lambda task: None) -> None:
        """Run all tasks of a new step.

        Raises:
            PeerUnreachable: a host is lost, or late. Go on with `agree_on_step` in another generation.
        """
        self._routes, self.routed_in = routes, self._require_generation().number
        self._run(before_task)

    def agree_on_step(self) -> int:
        """Return the step in which all hosts go on after a failure: the next one to be committed.

        A step that any living host has committed is committed here, too: that host knew that this one had its sums. A
        host without a state agrees to whatever the others have.

        Raises:
            PeerUnreachable: a host is lost, or late; or has what this one cannot catch up with.
        """
        mine = TaskProgress(
            step=self.step,
            table=self._table,
            units_here=tuple(sorted(self.state.all_states)),
            units_after=tuple(sorted(self.state.states)),
            blocks=self.state.list_complete_blocks(),
            routed_in=self.routed_in,
            routes=self._routes if self.routed_in else (),
            done=tuple(sorted(self._runner.done)),
            forgotten=tuple(sorted(self._log.forgotten)),
            has_copies=self._has_copies,
        )
        # Hosts may be at different steps, and mail of a finished step is refused: this mail is of no step.
        any_step = dataclasses.replace(self.make_mail(), step=PROGRESS_STEP)
        hosts = self._require_generation().hosts
        told = any_step.make_exchange(hosts, self.host, PROGRESS_MAIL).gather_by_host(mine)
        # Of those that are furthest: one that has just been sent its state may not know the table.
        furthest = max(told.values(), key=lambda progress: (progress.step, progress.table is not None))
        # Whoever was in the last generation is one step behind at most: to commit a step takes the rows of all hosts,
        # and each sends its own only after the commit before. So all that it lacks is the table of that step.
        told = drop_late_copies(told, furthest.step)
        if self._has_copies and self.step < furthest.step:
            self.drop_step()
            self.state.replace({})
        if not self.state.states:
            # Its units come from the others. The table is for a host that is behind when the hosts agree once more.
            self.step, self._table = furthest.step, furthest.table
        elif self.step < furthest.step:
            if self._gradients is None or furthest.table is None or self.step + 1 < furthest.step:
                raise PeerUnreachable(
                    f"step: found a host that has committed step {furthest.step - 1}, and {self.host} without sums of "
                    f"step {self.step}, with which it could commit it, too; a snapshot is needed"
                )
            # The sums of that step are kept from before this host's row was sent: nobody could commit without that.
            self._commit(furthest.table, self._gradients)
        # Those that are behind commit the step now, as this host may have done: they are counted as being there.
        self._progress = {
            host: progress
            if progress.step == furthest.step
            else catch_up(progress, furthest.step, self._units)
            for host, progress in told.items()
        }
        self.unit_holders = tuple(
            frozenset(
                host
                for host, progress in told.items()
                if number in (progress.units_here if progress.step == furthest.step else progress.units_after)
            )
            for number in range(len(self._units))
        )
        self.lasting_hosts = frozenset(
            host for host, progress in told.items() if progress.units_here and not progress.has_copies
        )
        self._has_copies = False
        # No host that is left has committed the step with these sums, and none will: holders of units may change before
        # it is resumed, and all exchange their sums anew.
        self._gradients = None
        return self.step

    def resume_step(self, routes: Routes, before_task: BeforeTask = lambda task: None) -> None:
        """Go on with the step that `agree_on_step` gave: only what the dead hosts had is computed again.

        Args:
            routes: routes with which the step begins if no host has begun it.
            before_task: called before each task.

        Raises:
            HoldersLost: a block has no living holder.
            PeerUnreachable: a further host is lost, or late.
        """
        newest = find_newest_routing(self._progress)
        if self.routed_in != newest:
            self.drop_step()  # the others went on without this host, and have done it again
        if not newest:
            self.begin_step(routes, before_task)
            return
        found = plan_continuation(self._progress, len(self.cut.blocks), self.config.schedule)
        self._routes, self.routed_in = found.routes, self._require_generation().number
        # Values of the old generation are lost on their way: each goes again from the log of its sender.
        self._runner.forget(found.redone)
        mail = self.make_mail()
        for resend in found.resends:
            if resend.sender == self.host:
                self._runner.send_again(resend.boundary, resend.receiver, mail)
        self._run(before_task, found.done)

    def rehearse(self, sharding: StageSharding) -> None:
        """Load the programs of all kinds of blocks, and of the updates of the units that are here, on zeros.

        Args:
            sharding: layout over the devices of this host.
        """
        config = self.config
        self._runner.sharding = self._sums.sharding = sharding

        def make_zeros(weight: Weight, dtype: Any) -> jax.Array:  # noqa: ANN401 - a dtype
            # On devices as those of a step are: with another placement a program is loaded again.
            place = sharding.place(sharding.find_weight_spec(weight.name))
            return jax.device_put(np.zeros(weight.shape, dtype), place)

        for kind in self.cut.kinds:
            block = self.cut.blocks[kind.kind.blocks[0]]
            weights = {weight.name: make_zeros(weight, weight.dtype) for weight in block.weights}
            data = self._read(self.step, FIRST_MICROBATCH)
            gradients, results = self._runner.rehearse(block, weights, data, KINDS[config.schedule])
            self._sums.rehearse(block.number, gradients, results)
        sums: dict[int, dict[str, Any]] = {
            number: {
                weight.name: make_zeros(weight, np.float32)
                for weight in self._units[number].weights
                if weight.is_trained
            }
            for number in self.state.states
        }
        make_rows(StepSums(()), sums, config.num_microbatches)
        changed, whole = self.cut.changed_variables, sharding.place(P())
        for number, found in sums.items():
            for weight in self._units[number].weights:
                if weight.name in changed:
                    shape = changed[weight.name][1]
                    found[weight.name] = jax.device_put(np.zeros(shape.shape, shape.dtype), whole)
        self.state.update(sums, CommitTable(divisor=config.num_microbatches, norm=0.0, loss=0.0, results={}))

    def finish_step(
        self, before_update: BeforeUpdate = lambda table: None, report: StageReport | None = None
    ) -> CommitTable:
        """Exchange sums and table, and update the state; the step is then committed here.

        Args:
            before_update: called with the table when this host knows that all hosts have their sums; what it raises
                keeps the step from being committed.
            report: what the tasks of this host took; None in a step in which hosts do not tell that.

        Raises:
            PeerUnreachable: a host is lost, or late; nothing is updated here, and the step may be resumed.
            SumsDiffer: a host computes wrongly; nothing is updated on any host.
            Exception: what an update raises that fails in its middle; if the state is donated, this host has no state
                any more.
        """
        config, mail = self.config, self.make_mail()
        sums = self._sums.finish(
            mail, SumLayout(self._routes, self._require_generation().living_holders, self._units)
        )
        gradients = {number: sums.add_up_unit(number) for number in self.state.states}
        # Before its row is sent: from then on another host may commit, and this one must be able to (`agree_on_step`).
        self._gradients = gradients
        axes = tuple(self._sums.sharding.mesh.shape.values())
        rows = make_rows(sums, gradients, config.num_microbatches, report, axes)
        hosts = self._require_generation().hosts
        rows_by_host = mail.make_exchange(hosts, self.host, ROWS_MAIL).gather_by_host(rows)
        table = make_table(rows_by_host, config.num_microbatches)
        before_update(table)  # first: of numbers that are not finite it says so
        self._commit(table, gradients)
        self.reports = {host: own.report for host, own in rows_by_host.items() if own.report is not None}
        return table

    def _commit(self, table: CommitTable, gradients: Gradients) -> None:
        """Update the state, which needs no other host, and drop what was kept of the step."""
        if self.config.donate_state:
            self.before_donation()
        try:
            self.state.update(gradients, table)
        except BaseException:
            if not self.state.states:
                self.drop_state()
            raise
        self.step += 1
        self._table, self._gradients = table, None
        self.routed_in = 0
        self._runner.begin_step()
        self._sums.begin_step(self.step)
        self.service.finish_step(self.step - 1)
        # Last of all: whatever it does, the step is committed.
        self.after_commit(CommittedStep(step=self.step, table=table, sums=gradients))

    def _run(self, before_task: BeforeTask, done: Collection[Task] = ()) -> None:
        mail = self.make_mail()
        order = self._order_own_tasks(frozenset(done))
        blocks = {block for task in order for block in task.hop.blocks}
        weights = {block: self.state.list_weights(block) for block in blocks}
        routes = {route.microbatch: route for route in self._routes}
        step = self.step
        self._runner.run(
            order, routes, mail, weights, lambda microbatch: self._read(step, microbatch), before_task
        )

    def _order_own_tasks(self, done: frozenset[Task]) -> tuple[Task, ...]:
        """Return the order of this host's tasks; that of the same routes is made once."""
        wanted = self._routes, done, self.block_seconds
        if self._ordered != wanted:
            found = order_tasks(self._routes, self.block_seconds, schedule=self.config.schedule, done=done)
            self._ordered, self._order = wanted, found.orders.get(self.host, ())
        return self._order

    def make_mail(self) -> StepMail:
        """Return the mail of the step under way."""
        return self.config.step_mail(
            service=self.service,
            generation=self._require_generation().number,
            step=self.step,
            wait_timeout_s=self.config.wait_timeout_s,
            check=self._check,
        )

    def _forget_devices(self) -> None:
        """Refer to no device any more: a mesh of those that go away would keep their backend."""
        found = self._sums.sharding
        self._runner.sharding = self._sums.sharding = found.with_mesh(found.mesh.abstract_mesh)
        if self._generation is not None:
            self._generation = dataclasses.replace(self._generation, sharding=None)

    def _require_generation(self) -> PipelineGeneration:
        assert self._generation is not None, "enter comes first"
        return self._generation
