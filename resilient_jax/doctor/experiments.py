"""The experiments: what JAX's runtime does on this machine when a process of a world dies, hangs, returns or leaves.

They are made in one world, one after the other: it forms; a process is killed in a collective; another returns in its
place; that one is stopped while the others meet; and one leaves its backend. Where one fails, the world is ended, and
the next experiment forms another. Every wait has a deadline, and `close` ends all processes.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from resilient_jax.doctor.check_result import CheckResult, CheckVerdict
from resilient_jax.doctor.experiment_world import (
    ANSWER_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    MAX_PROCESSES,
    START_TIMEOUT_S,
    ExperimentWorld,
    find,
    wait_error,
)
from resilient_jax.doctor.gpu_inventory import read_used_mib
from resilient_jax.doctor.line_process import ExperimentFailed, LineProcess
from resilient_jax.jax_runtime.worker_environment import Platform

GROUP: Final = "experiments"
QUIET_S: Final = 0.3
"""Those that wait for a dead process must not answer within this time: else they did not wait for it."""
RELEASE_DEADLINE_S: Final = 30.0
GOOD_RELEASE_S: Final = 5.0
"""As `quiesce_timeout_s`: a worker that has not left its collective by then is killed."""
KEPT_MIB: Final = 128
MIN_SHARE_FREED: Final = 0.75
"""Of the kept array: allocators keep some pages, and other processes change what a GPU has free."""

Experiment = Callable[[ExperimentWorld], CheckResult]


class Experiments:
    """Runs the experiments.

    Args:
        devices: ids of the devices that may be used, one for each process; processes may share one.
    """

    def __init__(self, platform: Platform, devices: Sequence[str], environment: Mapping[str, str]) -> None:
        self._platform: Platform = platform
        self._devices = tuple(devices)[:MAX_PROCESSES]
        self._environment = environment
        self._world: ExperimentWorld | None = None

    def run(self) -> Iterator[CheckResult]:
        """Yield a result for each experiment, as soon as it is there."""
        if len(self._devices) < 2:
            found = f"devices: found {len(self._devices)}, expected two or more"
            for name in ("world", *(name for name, _ in self._list())):
                yield _make_result(name, CheckVerdict.NOT_RUN, found)
            return
        try:
            yield self._attempt("world", self._describe_world)
            if self._world is None:
                for name, _ in self._list():
                    yield _make_result(name, CheckVerdict.NOT_RUN, "no world could be formed")
                return
            for name, experiment in self._list():
                yield self._attempt(name, experiment)
        finally:
            self.close()

    def close(self) -> None:
        """End all processes. Idempotent."""
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _list(self) -> tuple[tuple[str, Experiment], ...]:
        return (
            ("collective abort", self._abort_collective),
            ("rejoin", self._rejoin),
            ("live nodes", self._release_meeting),
            ("clear_backends", self._leave),
        )

    def _attempt(self, name: str, experiment: Experiment) -> CheckResult:
        try:
            if self._world is None:
                self._world = ExperimentWorld(self._platform, self._devices, self._environment)
                self._world.form()
            result = experiment(self._world)
        except ExperimentFailed as error:
            result = _make_result(name, CheckVerdict.PROBLEM, str(error), REMEDIES[name])
        if result.verdict is CheckVerdict.PROBLEM:
            self.close()
        return result

    def _describe_world(self, world: ExperimentWorld) -> CheckResult:
        count = len(world.processes)
        what = f"one {world.kind} device" if len(set(world.devices)) == 1 else f"a {world.kind} device each"
        return _make_result("world", CheckVerdict.OK, f"{count} processes with {what} met, and added up")

    def _abort_collective(self, world: ExperimentWorld) -> CheckResult:
        """Kill a process while the others wait for it in a collective."""
        seat = max(world.processes)
        victim = world.processes.pop(seat)
        world.order_all("add_up")
        for process in world.processes.values():
            find(process, ANSWER_TIMEOUT_S)  # it enters the collective
        _expect_waiting(world)
        victim.kill()
        began_s = time.monotonic()
        world.report_lost(seat)
        if self._platform == "cpu":  # on GPU XLA aborts by itself, once the service is told
            world.interrupt_all()
        released = _release(world, began_s)
        if released is None:
            return _make_result(
                "collective abort",
                CheckVerdict.PROBLEM,
                f"survivors were not released within {RELEASE_DEADLINE_S:g} s",
                REMEDIES["collective abort"],
            )
        seconds, error = released
        world.meet()
        world.add_up()
        return _judge_release("collective abort", seconds, f"survivors released and added up again ({error})")

    def _rejoin(self, world: ExperimentWorld) -> CheckResult:
        """Have a new process take the place of one that was killed."""
        old = len(self._devices) - 1
        if old in world.processes:  # a new world, after an experiment that failed
            world.drop(world.processes[old])
            world.report_lost(old)
            world.meet()
        process = world.start_process(old)
        find(process, START_TIMEOUT_S)
        began_s = time.monotonic()
        _join(world, process, old)
        # Under the old index: as far as the service goes on CPU, the collective, too, on GPU.
        world.meet()
        if self._platform == "cpu":
            del world.processes[old]
            process.order("leave")
            find(process, ANSWER_TIMEOUT_S)
            world.report_lost(old)
            began_s = time.monotonic()
            _join(world, process, len(self._devices))
            world.meet()
        world.add_up()
        seconds = time.monotonic() - began_s
        how = "in a spare seat" if self._platform == "cpu" else "under its old index"
        return _make_result(
            "rejoin", CheckVerdict.OK, f"{how}, and a sum of all, {seconds:.2f} s", seconds=seconds
        )

    def _release_meeting(self, world: ExperimentWorld) -> CheckResult:
        """Stop a process while the others wait for it in `get_live_nodes`."""
        seat = max(world.processes)
        members = sorted(world.processes)
        victim = world.processes.pop(seat)
        os.kill(victim.process.pid, signal.SIGSTOP)
        try:
            world.order_all("meet", members=members, timeout_s=ANSWER_TIMEOUT_S)
            _expect_waiting(world)
            began_s = time.monotonic()
            world.report_lost(seat)
            released = _release(world, began_s)
        finally:
            victim.kill()
        if released is None:
            return _make_result(
                "live nodes",
                CheckVerdict.PROBLEM,
                f"not released within {RELEASE_DEADLINE_S:g} s of a stand-in's shutdown",
                REMEDIES["live nodes"],
            )
        return _judge_release(
            "live nodes", released[0], "released by a stand-in while the process was stopped"
        )

    def _leave(self, world: ExperimentWorld) -> CheckResult:
        """Have a process drop its backend, and see whether the memory of an array comes back."""
        seat, process = next(iter(world.processes.items()))
        process.order("keep", mib=KEPT_MIB)
        held = self._read_memory(seat, find(process, ANSWER_TIMEOUT_S))
        process.order("leave")
        answer = find(process, ANSWER_TIMEOUT_S)
        left = self._read_memory(seat, answer)
        if held is None or left is None:
            found, is_good, figures = "what is in use of the GPU cannot be read", True, {}
        else:
            freed, figures = held - left, {"held_mib": held, "left_mib": left}
            found, is_good = f"{freed:.0f} MiB came back", freed >= MIN_SHARE_FREED * KEPT_MIB
        if answer["leaked_backends"]:
            found, is_good = f"the backend is still there: something refers to it; {found}", False
        return _make_result(
            "clear_backends",
            CheckVerdict.OK if is_good else CheckVerdict.WARNING,
            f"after an array of {KEPT_MIB} MiB was dropped with its backend: {found}",
            "" if is_good else REMEDIES["clear_backends"],
            **figures,
        )

    def _read_memory(self, seat: int, answer: Mapping[str, float]) -> float | None:
        """Return what is in use of a process's GPU, in MiB; on CPU the resident memory that it answered."""
        return read_used_mib(self._devices[seat]) if self._platform == "gpu" else answer["resident_mib"]


REMEDIES: Final = {
    "world": "run the line above by hand; see that no firewall is on loopback, and that JAX sees its devices",
    "collective abort": "workers that hang are killed after quiesce_timeout_s and started again from memory: slower; "
    "on GPU see NCCL's version and the flags above",
    "rejoin": "a worker that returns makes all others form a new world: slower; please report this",
    "live nodes": 'set live_nodes = "off" in the job\'s configuration, and report this',
    "clear_backends": "a re-form needs that memory again; a worker that has too little is started again",
}
"""What to do about an experiment that failed, by its name."""


def _make_result(
    name: str, verdict: CheckVerdict, found: str, remedy: str = "", **figures: float
) -> CheckResult:
    rounded = {key: round(value, 4) for key, value in figures.items()}
    return CheckResult(group=GROUP, name=name, verdict=verdict, found=found, remedy=remedy, figures=rounded)


def _judge_release(name: str, seconds: float, found: str) -> CheckResult:
    is_good = seconds <= GOOD_RELEASE_S
    return _make_result(
        name,
        CheckVerdict.OK if is_good else CheckVerdict.WARNING,
        f"{seconds:.3f} s: {found}",
        "" if is_good else REMEDIES[name],
        seconds=seconds,
    )


def _join(world: ExperimentWorld, process: LineProcess, seat: int) -> None:
    world.order_to_join(process, seat, members=())
    find(process, JOIN_TIMEOUT_S)
    world.processes[seat] = process


def _expect_waiting(world: ExperimentWorld) -> None:
    """Check that all members wait; raise ExperimentFailed if one does not."""
    for seat, process in world.processes.items():
        if (error := wait_error(process, time.monotonic() + QUIET_S)) is not None:
            raise ExperimentFailed(
                f"seat {seat}: found {error or 'a result'} before anything happened, expected a wait"
            )


def _release(world: ExperimentWorld, began_s: float) -> tuple[float, str] | None:
    """Return the seconds until all members have raised an error, and the first of these; None: not in time."""
    errors: list[str] = []
    for process in world.processes.values():
        error = wait_error(process, began_s + RELEASE_DEADLINE_S)
        if error is None:
            return None
        errors.append(error)
    return time.monotonic() - began_s, errors[0].split(":")[0]
