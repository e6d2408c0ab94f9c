"""Speculative compilation: the programs of likely next plans are compiled while training continues."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from resilient_jax.compile.ahead_of_time import CancellationCheck, CompilationJob
from resilient_jax.errors import CallerError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, ProcessIndex
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.calibration_fit import StepMeasurement
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.step.accumulation_call import AccumulationCall
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.host_grid import LiveHosts
from resilient_jax.trainer.arrangement import Arrangement, PlanSearcher, has_axes_for, list_plan_axes
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.plan_calibration import PlanCalibrator, fit_job
from resilient_jax.trainer.plan_forecast import PlanForecast, is_forecaster
from resilient_jax.trainer.step_programs import compile_mesh_step, compile_step
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.worker.world import World

Tree = Any
"""A pytree."""
MAX_HOSTS_FOR_ALL_PAIRS: Final = 8
"""Up to so many hosts every pair is a case; beyond, neighbors only, because only the number of hosts left matters."""
MAX_COMPILE_S: Final = 600.0
"""Programs are assumed to take no longer: the leader takes axes that give back more until the next failure."""

Key = tuple[object, ...]


class SpeculativeCompiler:
    """Lists what to compile ahead, for one process; remembers what it has compiled."""

    def __init__(self, planner: PlanSearcher, config: FitConfig, programs: TrainStep, example: Tree) -> None:
        self._planner, self._programs, self._example = planner, programs, example
        assert config.planner is not None, "its searcher was made from it"
        self._is_on = config.planner.compile_ahead
        self._calibrator = PlanCalibrator(config.planner.calibration) if config.planner.calibrate else None
        self._is_measuring = False
        """Whether nothing is compiled here, so that steps take as long as they do in the long run."""
        self._forecast: PlanForecast | None = None
        """Of this generation."""
        self._first_s, self._longest_s = 0.0, 0.0
        """The first step of this generation until the second is over; how much longer first steps were, at most."""
        self._job = AccumulationSpec(
            name="",
            step=0,
            num_microbatches=config.recipe.num_microbatches,
            reduction=config.parallelism.reduction,
        )
        """A step's accumulation, for its shape."""

    def end_step(self, world: World, current: Arrangement, number: int, seconds: float) -> None:
        """Note how long a step took; after the first one of a generation compile for likely next worlds.

        Not sooner: until then training waits for the programs of this generation itself.

        Args:
            number: number of the step in this generation, from 0. The second step waits for no programs.
        """
        if number == 0:
            self._first_s, self._is_measuring = seconds, False
            if self._calibrator is not None:
                self._calibrator.forget_steps()
            world.step_services.compile_ahead(self._list_jobs(world, current))
        elif number == 1:
            self._longest_s = max(self._longest_s, self._first_s - seconds)
            self._first_s = 0.0
            self._report_forecast()
        elif number == 2:
            # Behind all that is compiled after the first steps.
            world.step_services.compile_ahead([CompilationJob("steps are measured", self._begin_measuring)])
        # Of unequal teams it is not seen which of them took the time.
        elif self._calibrator is not None and self._is_measuring and isinstance(current.plan, Plan):
            self._measure(self._calibrator, world, current.plan, seconds)

    def _begin_measuring(self, check: CancellationCheck) -> bool:
        check()
        self._is_measuring = True
        return False

    def _measure(self, calibrator: PlanCalibrator, world: World, plan: Plan, seconds: float) -> None:
        """Note a step; after some of them fit constants to them, on the thread that compiles."""
        measured = calibrator.end_step(plan, seconds)
        if measured and is_forecaster(world, self._planner):
            self._is_measuring = False
            fit = functools.partial(self._fit, world, calibrator.given, measured)
            world.step_services.compile_ahead([CompilationJob("constants of estimates", fit)])

    def _fit(
        self,
        world: World,
        given: Calibration,
        measured: tuple[StepMeasurement, ...],
        check: CancellationCheck,
    ) -> bool:
        found = fit_job(given, measured, check)
        check()
        world.record_event(
            EventKind.PLAN_CALIBRATED,
            plan=measured[-1].plan.shape,
            step_s=measured[-1].step_s,
            estimated_s=found.estimated_s,
            calibrated_s=found.calibrated_s,
            error_before=found.fit.error_before,
            error=found.fit.error,
            plans=len(measured),
            constants=found.describe_changes(),
        )
        self._is_measuring = True
        if (forecast := self._forecast) is not None:
            forecast.note_fit(found.constants, len(measured))
            self._report_forecast()
        return False

    def leave_world(self) -> None:
        """Keep nothing of a generation that has ended: its devices may go away."""
        self._forecast = None

    def _report_forecast(self) -> None:
        forecast = self._forecast
        if forecast is not None:
            forecast.report(max(self._longest_s, self._first_s))

    def _make_forecast(self, world: World, current: Arrangement, known: set[Key]) -> PlanForecast | None:
        if current.plan is None:
            return None
        devices, variables = world.local_devices, self._programs.abstract_state.variables
        return PlanForecast(
            self._planner,
            world,
            current.plan,
            # After the loss of this host there may be none with as many devices.
            lambda plan: (
                has_axes_for(plan, len(devices))
                and _make_key(self._planner.make_arrangement(plan, devices, variables)) in known
            ),
        )

    def _estimate_changes(self, check: CancellationCheck) -> bool:
        """Search the plans after losses and joins, and report them; return False: nothing is compiled."""
        forecast = self._forecast
        if forecast is not None:
            forecast.estimate(check)
            self._report_forecast()
        return False

    def prepare_join(self, world: World, best: Arrangement) -> None:
        """Compile for the axes that the others train with, in the rehearsal of a host that joins them.

        The leader may keep these, because the others' programs for the best axes are not ready, and cost more than such
        axes give back. Where they give back much nothing is compiled, and the host is ready sooner.

        Args:
            best: arrangement for all hosts that is rehearsed.
        """
        axes = world.step_services.plan_axes
        if not axes:
            others = tuple(host for host in world.hosts if host != world.host)
            with contextlib.suppress(PlanError):  # without this host the others have none
                axes = list_plan_axes(self._planner.find_plan(others))
        kept = self._planner.find_plan_with_axes(world.hosts, axes) if axes else None
        if kept is None or best.plan is None:
            return
        # What they give back: D (1 - v / v_best) = D (1 - t_best / t), in s.
        if (
            world.step_services.next_failure_s * (1 - best.plan.step_time_s / kept.step_time_s)
            > MAX_COMPILE_S
        ):
            return
        devices, variables = world.local_devices, self._programs.abstract_state.variables
        then = self._planner.make_arrangement(kept, devices, variables)
        if _make_key(then) == _make_key(best):
            return
        if then.spans_hosts:
            live = LiveHosts.from_devices(world.devices, world.host_index)
            compile_mesh_step(self._programs, then, live, self._job, lambda: None)
        else:
            compile_step(self._programs, then, devices, self._example, self._job, lambda: None)

    def _list_jobs(self, world: World, current: Arrangement) -> Iterator[CompilationJob]:
        """Yield the jobs for likely next worlds, the likeliest first; before them, the search of plans after changes.

        Args:
            current: the arrangement of this generation, whose programs are compiled already.
        """
        # Of this generation only: programs that were compiled for another one are gone.
        known: set[Key] = {_make_key(current)}
        self._forecast = self._make_forecast(world, current, known)
        yield CompilationJob("plans after a change", self._estimate_changes)
        if not self._is_on:
            return
        reduction = AccumulationCall(
            devices=world.devices,
            spare_devices=world.spare_devices,
            process_index=ProcessIndex(world.host_index),
            spec=self._job,
            replica_shape=current.replica_shape,
            like=self._programs.abstract_sums,
        )
        likely = list_likely_hosts(world.hosts, self._planner.all_hosts)
        if current.plan is not self._planner.find_plan(world.hosts):
            # The leader decided for others than the best axes, which follow later.
            likely = itertools.chain([world.hosts], likely)
        for hosts in likely:
            if world.host not in hosts:
                continue
            # Here, and not on the thread that compiles: the members may change while it does.
            live = _make_live(world, hosts)
            prepare = functools.partial(self._prepare, known, hosts, world.local_devices, reduction, live)
            yield CompilationJob(_describe(world.hosts, hosts), prepare)

    def _prepare(
        self,
        known: set[Key],
        hosts: tuple[HostName, ...],
        devices: list[Device],
        reduction: AccumulationCall,
        live: LiveHosts | None,
        check: CancellationCheck,
    ) -> bool:
        """Compile for these hosts; return False if there was nothing to do."""
        try:
            plan = self._planner.find_plan(hosts)
        except CallerError:  # such a world is refused, with the reason, when it forms
            return False
        then = self._planner.make_arrangement(plan, devices, self._programs.abstract_state.variables)
        has_compiled, is_known = False, _make_key(then) in known
        if then.spans_hosts:
            if (
                live is None
                or is_known
                or not compile_mesh_step(self._programs, then, live, self._job, check)
            ):
                return False
            has_compiled = True
        elif not is_known:
            compile_step(self._programs, then, devices, self._example, self._job, check)
            has_compiled = True
        known.add(_make_key(then))
        size = live.grid.mesh.devices.shape if live is not None and not then.spans_hosts else None
        if live is not None and size is not None and (then.replica_shape, size) not in known:
            has_compiled |= reduction.compile_for_grid(live.grid, then.replica_shape, check)
            known.add((then.replica_shape, size))
        if has_compiled:
            self._report_forecast()
        return has_compiled


def list_likely_hosts(
    hosts: tuple[HostName, ...], all_hosts: Sequence[HostName]
) -> Iterator[tuple[HostName, ...]]:
    """Yield the hosts of likely next worlds: one fewer, one back, two fewer.

    >>> names = [HostName(name) for name in "abcd"]
    >>> [len(found) for found in list_likely_hosts(tuple(names[:3]), names)]
    [2, 2, 2, 4, 1, 1, 1]
    """
    for lost in hosts if len(hosts) > 1 else ():
        yield tuple(host for host in hosts if host != lost)
    for back in all_hosts:
        if back not in hosts:
            yield (*hosts, back)
    pairs = (
        itertools.combinations(hosts, 2)
        if len(hosts) <= MAX_HOSTS_FOR_ALL_PAIRS
        else itertools.pairwise(hosts)
    )
    for pair in pairs if len(hosts) > 2 else ():
        yield tuple(host for host in hosts if host not in pair)


def _make_live(world: World, hosts: Sequence[HostName]) -> LiveHosts | None:
    """Return these hosts, of which at most one is not in the world; None: its devices are unknown."""
    devices = [device for device in world.devices if world.host_of_device(device) in hosts]
    if not set(hosts) <= set(world.hosts):
        spare = world.spare_devices
        if not spare:
            return None
        devices += [device for device in spare if device.process_index == spare[0].process_index]
    return LiveHosts.from_devices(devices, world.host_index)


def _make_key(arrangement: Arrangement) -> Key:
    """Return a key without devices, because keys may outlive them."""
    return arrangement.replica_shape, arrangement.placement.with_abstract_mesh()


def _describe(now: tuple[HostName, ...], then: tuple[HostName, ...]) -> str:
    lost, back = sorted(set(now) - set(then)), sorted(set(then) - set(now))
    if lost:
        return f"without {' and '.join(lost)}"
    return f"with {' and '.join(back)}" if back else "with the best axes"
