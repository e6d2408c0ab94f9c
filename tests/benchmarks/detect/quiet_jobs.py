"""Simulated jobs in which nothing hangs, though much takes long now and then: how many hosts would be killed.

Each host is a real `WorkerActivity` and `HangDetector` on a clock of its own, with the settings of a job by default.
What is drawn, for each job of some hours:

    a step                        0.5 to 60 s, the same job's vary by 5 %; 1 in 1,000 takes 3 times as long
    its input                     a twentieth of that; 1 read in 1,000 takes up to 45 s (retries of an object store)
    code of the script's own      up to a second; 1 in 500 takes up to 60 s
    a checkpoint                  5 to 120 s, every 50 to 500 steps
    an evaluation                 10 to 100 batches of 0.1 to 3 s, every 100 to 1,000 steps
    a new generation              every 3 hours: restores for up to 200 s, compiles for up to 20 minutes
    a pause of the machine        every 20 hours: 10 to 300 s in which the process does not run
"""

import random
from collections.abc import Callable, Sequence

import msgspec

from resilient_jax.config import JobConfig
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.telemetry.worker_activity import WorkerActivity
from resilient_jax.worker.hang_detection import MAX_LOOK_INTERVAL_S, HangDetector, HangLimits

HOUR_S = 3600.0
JOB_HOURS = 5
HOSTS = 4


class QuietFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the detection of hangs made of jobs without any.

    Attributes:
        job_hours: simulated.
        false_kills: hosts that would have been killed.
        longest_s: the longest silence of any host that was not excused, in seconds.
    """

    job_hours: int
    false_kills: int
    longest_s: float


GENERATION = Generation(number=GenerationNumber(1), phase=GenerationPhase.ACTIVE)
"""Of which an activity only needs to know that it begins."""


class QuietHost:
    """One host of a job.

    Attributes:
        now_s: its clock.
        kills: how often it would have been killed.
        longest_s: see `QuietFigures`.
    """

    def __init__(self, limits: HangLimits) -> None:
        self.now_s, self.kills, self.longest_s = 0.0, 0, 0.0
        self.activity = WorkerActivity(lambda: self.now_s)
        self._detector = HangDetector(limits, 0.0)
        self._step = 0

    def begin_generation(self) -> None:
        self.activity.begin_generation(GENERATION)

    def begin_step(self) -> None:
        self._step += 1
        self.activity.begin_step(self._step)

    def spend(self, task: WorkerTask | None, seconds: float, *, is_excused: bool = False) -> None:
        """Do something for so long; None: code of the script's own."""
        if task is None:
            self._pass(seconds, is_excused)
            return
        with self.activity.task(task):
            self._pass(seconds, is_excused)

    def stop(self, seconds: float) -> None:
        """Let time pass in which nothing of the process runs, its guard thread neither."""
        self._look(is_excused=False)
        self.now_s += seconds
        self._look(is_excused=False)

    def _pass(self, seconds: float, is_excused: bool) -> None:
        self.longest_s = max(self.longest_s, 0.0 if is_excused else seconds)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self._look(is_excused)
            self.now_s = min(end_s, self.now_s + MAX_LOOK_INTERVAL_S)
        self._look(is_excused)

    def _look(self, is_excused: bool) -> None:
        found = self.activity.read(0)
        # A wait in a sum is a wait for others: which of them is late is what their own tasks say.
        is_named = self._detector.look(found, self.now_s, is_excused=is_excused, interrupted_s=None)
        self.kills += is_named is not None and found.task is not WorkerTask.SUM


def run_job(seed: str, config: JobConfig) -> Sequence[QuietHost]:
    """Return the hosts of a job after `JOB_HOURS`."""
    chance = random.Random(seed)
    limits = HangLimits(
        regular_s=config.hang_timeout_s,
        other_s=config.user_code_timeout_s,
        forming_timeout_s=config.forming_timeout_s,
    )
    hosts = [QuietHost(limits) for _ in range(HOSTS)]
    step_s = 0.5 * 120.0 ** chance.random()
    checkpoint_every, evaluate_every = chance.randrange(50, 501), chance.randrange(100, 1001)
    checkpoint_s, batch_s = chance.uniform(5, 120), chance.uniform(0.1, 3)
    batches, step = chance.randrange(10, 101), 0
    next_generation_s, next_pause_s = 0.0, chance.expovariate(1 / (20 * HOUR_S))
    while hosts[0].now_s < JOB_HOURS * HOUR_S:
        if hosts[0].now_s >= next_generation_s:
            next_generation_s = hosts[0].now_s + 3 * HOUR_S
            _begin_generation(hosts, chance)
        if hosts[0].now_s >= next_pause_s:
            next_pause_s = hosts[0].now_s + chance.expovariate(1 / (20 * HOUR_S))
            chance.choice(hosts).stop(chance.uniform(10, 300))
        step += 1
        _run_step(hosts, step_s, chance)
        if step % checkpoint_every == 0:
            _each(hosts, lambda host: host.spend(WorkerTask.CHECKPOINT, checkpoint_s * _vary(chance)))
        if step % evaluate_every == 0:
            _each(hosts, lambda host: _evaluate(host, batches, batch_s, chance))
    return hosts


def judge_quiet_jobs(job_hours: int, half: str, config: JobConfig | None = None) -> QuietFigures:
    """Return the figures of so many hours of jobs of a half of the seeds."""
    jobs = [
        run_job(f"{half} quiet {number}", config or JobConfig()) for number in range(job_hours // JOB_HOURS)
    ]
    hosts = [host for job in jobs for host in job]
    return QuietFigures(
        job_hours=len(jobs) * JOB_HOURS,
        false_kills=sum(host.kills for host in hosts),
        longest_s=round(max((host.longest_s for host in hosts), default=0.0), 1),
    )


def _begin_generation(hosts: Sequence[QuietHost], chance: random.Random) -> None:
    restore_s, compile_s = chance.uniform(1, 200), chance.uniform(5, 1200)
    for host in hosts:
        host.begin_generation()
        host.spend(WorkerTask.RESTORE, restore_s * _vary(chance))
        host.begin_step()
        host.spend(WorkerTask.COMPUTE, compile_s * _vary(chance), is_excused=True)
    _meet(hosts)


def _run_step(hosts: Sequence[QuietHost], step_s: float, chance: random.Random) -> None:
    for host in hosts:
        host.begin_step()
        host.spend(None, chance.uniform(0, 60) if chance.random() < 1 / 500 else chance.random())
        is_stalled = chance.random() < 1 / 1000
        host.spend(WorkerTask.INPUT, chance.uniform(0, 45) if is_stalled else step_s / 20 * _vary(chance))
        factor = 3 if chance.random() < 1 / 1000 else 1
        host.spend(WorkerTask.COMPUTE, factor * step_s * _vary(chance))
    _meet(hosts)
    _each(hosts, lambda host: host.spend(WorkerTask.COMMIT, step_s / 50 * _vary(chance)))


def _evaluate(host: QuietHost, batches: int, batch_s: float, chance: random.Random) -> None:
    with host.activity.task(WorkerTask.EVALUATION):
        for _ in range(batches):
            host.spend(WorkerTask.INPUT, batch_s / 20)
            host.spend(WorkerTask.COMPUTE, batch_s * _vary(chance))


def _meet(hosts: Sequence[QuietHost]) -> None:
    """Have all hosts wait in a sum for the last of them."""
    end_s = max(host.now_s for host in hosts) + 0.01
    _each(hosts, lambda host: host.spend(WorkerTask.SUM, end_s - host.now_s))


def _each(hosts: Sequence[QuietHost], do: Callable[[QuietHost], None]) -> None:
    for host in hosts:
        do(host)


def _vary(chance: random.Random) -> float:
    return max(0.5, chance.gauss(1.0, 0.05))
