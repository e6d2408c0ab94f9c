"""What the hosts of a pipeline take for their tasks: told to each other, judged, and used to divide a step.

Every few steps each host tells the others, beside its rows of the commit table, what its tasks took, and how long the
mail that it received was under way. Before the next step the first host judges which hosts are slow, all of them
measure their devices or links if it asked for that, and each computes the same division of the steps that follow.
"""

import collections
import functools
import time
from collections.abc import Sequence
from typing import Final

import jax

from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.events import EventKind
from resilient_jax.health.finding import Finding
from resilient_jax.health.link_comparison import Pairs
from resilient_jax.host_exchange.step_mail import STEP_MAIL
from resilient_jax.pipeline.layer_speeds import (
    MAX_STEPS,
    PipelineShape,
    StepDurations,
    compute_growth,
    estimate_block_seconds,
    estimate_pipeline_slowdown,
)
from resilient_jax.pipeline.link_exchanges import MailExchanges
from resilient_jax.pipeline.pipeline_step import PipelineWorker
from resilient_jax.pipeline.stage_losses import (
    StageLayout,
    count_unlike_tasks,
    estimate_stage_losses,
    estimate_stage_outlook,
    make_even_seconds,
)
from resilient_jax.pipeline.step_division import DivisionChange, DivisionChooser, TaskSeconds
from resilient_jax.pipeline.task_timings import StageReport
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss
from resilient_jax.protocol.recovery_records import MAX_FORESEEN_HOSTS
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.protocol.state_records import StageLoss, StageOutlook
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.batch_source import MicrobatchInput
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.link_speed import choose_exchange_bytes
from resilient_jax.step.slow_host_watch import UNUSUAL_ACCUMULATIONS
from resilient_jax.step.watch_report import WatchReport
from resilient_jax.trainer.stage_axes import FewerDevices
from resilient_jax.trainer.unit_placement import UnitPlacement
from resilient_jax.transport.mail_protocol import MailKind

DEVICES_MAIL: Final = MailKind("devices")
"""What a host has measured of its devices, at the same time as the others."""

WORK_NAME: Final = "pipeline"
"""Under which tasks are judged, as the microbatches of an accumulation are under its name."""
MAX_SIMULATED_TASKS: Final = 4_000
"""Of those replicas of a step that differ. An estimate prices twenty such steps, two seconds on one core: so long the
others wait, twice in a generation."""
MAX_LISTED_HOSTS: Final = 256
"""Of which the loss of each is estimated; of more, what a loss makes is known by the number of lost hosts alone."""
MAX_PAIRED_HOSTS: Final = 16
"""Of which the loss of each two is estimated: the reports of three hosts have 136 losses then."""
NUM_LISTING: Final = 3
"""The first hosts report the loss of each host, or of two: one is left if any two are lost."""


class StageWatch:
    """The tasks of one generation.

    Args:
        placement: placement of the generation, whose quotas the watch changes.
        worker: worker of this host, whose times of tasks the watch changes.
        data: source of the lengths of documents.
        balance_by_speed: whether steps are divided by what tasks take; steps are not while a stage is kept for an
            absent host.
        bytes_per_s: speed at which a host gets blocks, as far as known.
        fewer_devices: what hosts do without some of their devices.

    Attributes:
        losses: what the loss of each host, or of two, would make of the pipeline; for the first three hosts, from the
            second step on.
        outlook: what the loss of any hosts would make of the pipeline, by their number; for the first nine hosts, of
            which one is left if any eight are lost.
        order: hosts of the replicas in their order, for the same nine hosts, whatever the number of tasks.
    """

    def __init__(
        self,
        placement: UnitPlacement,
        worker: PipelineWorker,
        data: Prefetcher,
        schedule: PipelineSchedule,
        *,
        balance_by_speed: bool,
        block_bytes: Sequence[float],
        bytes_per_s: float,
        fewer_devices: FewerDevices,
    ) -> None:
        world = placement.world
        self._placement = placement
        self._worker = worker
        self._data = data
        self._schedule = schedule
        self._slow_hosts = world.step_services.watch
        self._chooser = (
            DivisionChooser(placement.teams, placement.quotas, schedule)
            if balance_by_speed and not placement.absent
            else None
        )
        self.losses: tuple[StageLoss, ...] = ()
        self.outlook: StageOutlook | None = None
        self.order = placement.stage_hosts if world.host in world.hosts[: MAX_FORESEEN_HOSTS + 1] else ()
        self._is_measured = False
        """Whether these follow from what tasks were measured to take."""
        self._block_bytes, self._bytes_per_s = tuple(block_bytes), bytes_per_s
        self._fewer_devices = fewer_devices
        self._num_steps = 0
        self._durations: collections.deque[tuple[int, float]] = collections.deque(maxlen=MAX_STEPS)
        self._begun: tuple[int, float] | None = None
        """The step under way, and the monotonic time of its begin."""
        worker.received.take(STEP_MAIL)  # what came before is of no step of this generation
        if self._slow_hosts is not None and self._slow_hosts.judge is not None:
            work = placement.describe_work()
            self._slow_hosts.judge.set_groups(WORK_NAME, {str(host): work[host] for host in world.hosts})

    def begin_step(self, step: int) -> None:
        """Act on what the hosts told each other in the step before, if they did. Every host must call this.

        Raises:
            PeerUnreachable: a host is lost, or late, while devices or links are measured.
        """
        if self._begun is not None:
            begun_step, begun_s = self._begun
            self._durations.append((begun_step, time.monotonic() - begun_s))
        self._look(step)
        self._begun = step, time.monotonic()

    def _look(self, step: int) -> None:
        hosts, reports = self._placement.world.hosts, self._worker.reports
        self._worker.reports = {}
        measured = {host: report.task_seconds for host, report in reports.items()}
        is_told = len(reports) == len(hosts)
        if self.order and (self._num_steps == 1 or is_told > self._is_measured):
            self._estimate_losses(measured)
            self._is_measured = is_told
        if not is_told or len(hosts) == 1:
            return
        if self._slow_hosts is not None:
            watched = [reports[host].watched for host in hosts]
            # By mail: no pipeline waits inside of JAX.
            exchange = self._worker.make_mail().make_exchange(hosts, self._placement.world.host, DEVICES_MAIL)
            self._slow_hosts.look(self._describe_step(step - 1), watched, exchange, self._prepare_links)
            if self._slow_hosts.judge is not None:
                self._slow_hosts.judge.estimate_by(
                    functools.partial(self._estimate_slowdown, measured, tuple(self._durations))
                )
        if self._chooser is not None:
            change = self._chooser.choose(measured)
            if change is not None:
                self._take(change, step)

    def end_tasks(self, step: int) -> StageReport | None:
        """Count the tasks of a step, which all are done here; return what to tell, in a step in which hosts do."""
        work, received = self._worker.timings.end_step(), self._worker.received.take(STEP_MAIL)
        if self._slow_hosts is not None and work.microbatches:
            inputs = [
                MicrobatchInput(waited_s, self._data.lengths(step, microbatch))
                for microbatch, waited_s in zip(work.microbatches, work.waited_s, strict=True)
            ]
            self._slow_hosts.add(self._describe_step(step), [len(work.microbatches)], work.seconds, inputs)
            self._slow_hosts.amend(
                self._describe_step(step),
                received_bytes=float(received.num_bytes),
                received_s=received.seconds,
            )
        self._num_steps += 1
        if self._num_steps <= UNUSUAL_ACCUMULATIONS:
            self._worker.timings.clear()
        if step % EXCHANGE_INTERVAL_STEPS or len(self._placement.world.hosts) == 1:
            return None
        watched = WatchReport()
        if self._slow_hosts is not None:
            watched = self._slow_hosts.take_report(self._describe_step(step))
        return StageReport(watched, self._worker.timings.estimate())

    def _estimate_losses(self, measured: TaskSeconds) -> None:
        """Estimate what the loss of hosts would make of the pipeline, by what tasks were measured to take, or by their
        operations; not for a step of so many tasks that the others would wait for it.
        """
        layout, hosts = self._describe_layout(measured), self._placement.world.hosts
        if count_unlike_tasks(layout) > MAX_SIMULATED_TASKS:
            return
        self.outlook = estimate_stage_outlook(layout, MAX_FORESEEN_HOSTS)
        if self._placement.world.host in hosts[:NUM_LISTING] and len(hosts) <= MAX_LISTED_HOSTS:
            most_lost = 2 if len(hosts) <= MAX_PAIRED_HOSTS else 1
            self.losses = estimate_stage_losses(layout, most_lost)

    def _describe_layout(self, measured: TaskSeconds) -> StageLayout:
        placement = self._placement
        is_measured = all(measured.get(host) for host in placement.world.hosts)
        return StageLayout(
            teams=tuple(placement.teams),
            quotas=placement.quotas,
            absent=placement.absent,
            num_stages=placement.num_stages,
            schedule=self._schedule,
            block_costs=placement.block_costs,
            block_seconds=tuple(
                estimate_block_seconds(
                    placement.teams,
                    placement.block_costs,
                    measured,
                    {host: 1 / speed for host, speed in placement.device_speeds.items()},
                )
            )
            if is_measured and not placement.absent
            else make_even_seconds(placement.block_costs, self._schedule),
            block_bytes=self._block_bytes,
            bytes_per_s=self._bytes_per_s,
            device_speeds=placement.device_speeds,
        )

    def _estimate_slowdown(
        self,
        measured: TaskSeconds,
        durations: StepDurations,
        findings: Sequence[Finding],
        after_loss: DevicesAfterLoss,
    ) -> Slowdown | None:
        """Return what slow hosts cost, by what tasks were measured to take; None while a stage is kept."""
        placement = self._placement
        if placement.absent:
            return None
        shape = PipelineShape(
            hosts=tuple(host for host in placement.stage_hosts if host not in placement.absent),
            block_costs=placement.block_costs,
            num_stages=placement.num_stages,
            num_microbatches=sum(placement.quotas),
            schedule=self._schedule,
            is_balanced=self._chooser is not None,
            device_speeds=placement.device_speeds,
        )
        speeds = tuple(sorted(placement.world.step_services.layer_speeds.items()))
        return estimate_pipeline_slowdown(
            placement.world.generation,
            shape,
            findings,
            speeds,
            measured,
            leave_out=functools.partial(self._fewer_devices.leave_out, after_loss),
            compute_growth=functools.partial(compute_growth, durations),
        )

    def _prepare_links(self, rounds: Sequence[Pairs]) -> MailExchanges:
        world = self._placement.world
        size = choose_exchange_bytes(jax.local_devices()[0].platform)
        return MailExchanges(self._worker.make_mail(), world.hosts, world.host_index, rounds, size)

    def _describe_step(self, step: int) -> AccumulationSpec:
        return AccumulationSpec(
            name=WORK_NAME,
            step=step,
            num_microbatches=sum(self._placement.quotas),
            reduction="exact",
            balance_by_speed=self._chooser is not None,
        )

    def _take(self, change: DivisionChange, step: int) -> None:
        world = self._placement.world
        self._placement.set_quotas(change.division.quotas)
        self._worker.block_seconds = change.division.seconds
        if world.host == world.hosts[0]:
            world.record_event(
                EventKind.PIPELINE_REBALANCED,
                step=step,
                shares=" ".join(map(str, change.division.quotas)),
                before_s=round(change.before_s, 4),
                after_s=round(change.after_s, 4),
            )
