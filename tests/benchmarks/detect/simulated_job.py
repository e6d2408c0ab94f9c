"""A job with packed documents of widely varying lengths, of which one device may become slow. Pure, drawn from a seed.

Set up as tables 4 and 5 of ResiHP (arXiv 2605.06374): 1F1B pipelines; a microbatch takes alpha N + beta sum l_i^2 on
each stage, with 1 to 2 % of noise. Made harder: some microbatches take several times as long for no lasting reason,
some steps are disturbed as a whole (and marked, as a worker marks them), and no two devices are equally fast.

The devices of a tensor group compute each microbatch together, so the group is what can be told to be slow: a stage of
a replica, here a host.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from resilient_jax.health.step_prediction import StepPath
from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import Routes, make_route
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, Task, TaskKind
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming

NUM_STEPS: Final = 200
MARGIN_STEPS: Final = 50
"""A device becomes slow after so many steps, and before the last so many."""
SLOW_FACTOR: Final = (1.3, 3.0)
NOISE: Final = (0.01, 0.02)
DEVICE_SPREAD: Final = 0.02
HICCUP_PROBABILITY, HICCUP_FACTOR = 1 / 500, (1.5, 5.0)
"""Of a microbatch on a stage."""
DISTURBED_INTERVAL_STEPS, DISTURBED_FACTOR = 50, (1.0, 4.0)
"""Evaluations, snapshots and the like."""
FORWARD_SHARE: Final = 1 / 3
REDUCTION_SHARE: Final = 0.05
"""Of the first step: the sum of gradients and the update, the same in each step."""
DOCUMENT_MEDIAN, DOCUMENT_SIGMA = 500.0, 1.5
"""Of a lognormal distribution of lengths: most are short, and the tail reaches the longest that there is."""
FLOPS: Final = 150e12
"""That a device really computes in a second; half of that in attention."""
TENSOR_DEVICES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Sizes of a job.

    Attributes:
        parameters: of the model.
        layers: of the model.
        width: of a layer.
        tokens: of a microbatch.
        microbatches: of a replica in a step.
        replicas: of the model.
        stages: of a pipeline.
    """

    parameters: float
    layers: int
    width: int
    tokens: int
    microbatches: int
    replicas: int = 2
    stages: int


SIZES: Final = {
    "small": JobSize(parameters=7e9, layers=32, width=4096, tokens=8192, microbatches=4, stages=2),
    "medium": JobSize(parameters=14e9, layers=40, width=5120, tokens=16384, microbatches=8, stages=4),
    "large": JobSize(parameters=13e9, layers=40, width=5120, tokens=32768, microbatches=8, stages=4),
}
"""By name; tables 4 and 5."""


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What can be observed of a step.

    Attributes:
        timings: by host.
        seconds: from its start to its end.
        lengths: for each replica (sum of lengths, of their squares) of its microbatches.
        is_disturbed: the step is marked.
    """

    timings: dict[HostName, StepTiming]
    seconds: float
    lengths: list[list[tuple[float, float]]]
    is_disturbed: bool


class SimulatedJob:
    """One job.

    Attributes:
        slow_host: the host that becomes slow; None: none does.
        slow_from: the first step in which it is.
        groups: for each host which stage it computes.
    """

    def __init__(self, size: JobSize, seed: str, *, is_slow: bool) -> None:
        self.size = size
        self._random = chance = random.Random(seed)
        self.hosts = [
            [HostName(f"replica-{replica}-stage-{stage}") for stage in range(size.stages)]
            for replica in range(size.replicas)
        ]
        self.groups = {host: str(stage) for hosts in self.hosts for stage, host in enumerate(hosts)}
        self.paths = [make_path(hosts, size.microbatches) for hosts in self.hosts]
        self._noise = chance.uniform(*NOISE)
        devices = size.stages * TENSOR_DEVICES
        alpha = 6 * size.parameters / devices / FLOPS
        beta = 6 * size.layers * size.width / devices / (FLOPS / 2)
        self._costs = {
            host: (alpha * _draw_near_one(chance), beta * _draw_near_one(chance)) for host in self.groups
        }
        self.slow_host = chance.choice(list(self.groups)) if is_slow else None
        self.slow_from = chance.randrange(MARGIN_STEPS, NUM_STEPS - MARGIN_STEPS)
        self._slow_factor = chance.uniform(*SLOW_FACTOR)
        self.reduction_s = REDUCTION_SHARE * alpha * size.tokens * size.microbatches

    def run(self) -> Iterator[SimulatedStep]:
        """Yield its steps."""
        for step in range(NUM_STEPS):
            yield self._run_step(step)

    def _run_step(self, step: int) -> SimulatedStep:
        chance = self._random
        is_disturbed = not step or chance.random() < 1 / DISTURBED_INTERVAL_STEPS
        disturbance = chance.uniform(*DISTURBED_FACTOR) if is_disturbed else 1.0
        lengths, timings, longest_s = [], {}, 0.0
        for path, hosts in zip(self.paths, self.hosts, strict=True):
            sums = [pack_microbatch(chance, self.size.tokens) for _ in range(self.size.microbatches)]
            lengths.append(sums)
            took_s = {
                (host, index): disturbance * self._draw_seconds(host, step, *sums[index])
                for host in hosts
                for index in range(self.size.microbatches)
            }
            longest_s = max(longest_s, path.predict_s(lambda task, took_s=took_s: share_of(task, took_s)))
            for host in hosts:
                works = tuple(
                    ReplicaWork(0, 1, *sums[index], took_s[host, index])
                    for index in range(self.size.microbatches)
                )
                timings[host] = StepTiming(step, works, is_disturbed=is_disturbed)
        return SimulatedStep(
            timings=timings,
            seconds=longest_s + self.reduction_s,
            lengths=lengths,
            is_disturbed=is_disturbed,
        )

    def find_cost_s(self, host: HostName, tokens: float, squares: float) -> float:
        """Return what a microbatch takes on a host before noise."""
        alpha, beta = self._costs[host]
        return alpha * tokens + beta * squares

    def _draw_seconds(self, host: HostName, step: int, tokens: float, squares: float) -> float:
        seconds = self.find_cost_s(host, tokens, squares) * self._random.gauss(1.0, self._noise)
        if self._random.random() < HICCUP_PROBABILITY:
            seconds *= self._random.uniform(*HICCUP_FACTOR)
        is_slow = host == self.slow_host and step >= self.slow_from
        return seconds * (self._slow_factor if is_slow else 1.0)


def pack_microbatch(chance: random.Random, tokens: int) -> tuple[float, float]:
    """Return the sum of lengths, and of their squares, of documents that fit into so many tokens."""
    total = squares = 0
    while total < tokens:
        length = min(int(chance.lognormvariate(0.0, DOCUMENT_SIGMA) * DOCUMENT_MEDIAN) + 1, tokens - total)
        total, squares = total + length, squares + length * length
    return float(total), float(squares)


def make_path(hosts: Sequence[HostName], microbatches: int) -> StepPath:
    """Return the 1F1B schedule of one replica."""
    routes: Routes = tuple(make_route(index, [(host, 1) for host in hosts]) for index in range(microbatches))
    orders = order_tasks(
        routes, lambda _host, kind, _block: SHARES[kind], schedule=PipelineSchedule.WHOLE_BACKWARD
    )
    return StepPath(orders.orders, routes)


SHARES: Final = {TaskKind.FORWARD: FORWARD_SHARE, TaskKind.BACKWARD: 1 - FORWARD_SHARE}


def share_of(task: Task, seconds: dict[tuple[HostName, int], float]) -> float:
    """Return what a task takes of the seconds of its microbatch on its host."""
    return SHARES[task.kind] * seconds[task.hop.host, task.microbatch]


def _draw_near_one(chance: random.Random) -> float:
    return chance.uniform(1 - DEVICE_SPREAD, 1 + DEVICE_SPREAD)
