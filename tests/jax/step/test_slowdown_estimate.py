"""What slow hosts cost, and what each action would make of it: for equal work, and for the layers of a pipeline."""

import itertools
import random

import msgspec
import pytest

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.pipeline.layer_speeds import PipelineShape, estimate_pipeline_slowdown
from resilient_jax.pipeline.step_division import TaskSeconds
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, TaskKind
from resilient_jax.pipeline_schedule.teams import cut_by_speed, make_teams
from resilient_jax.policy.devices_after_loss import DeviceChoice, DevicesAfterLoss
from resilient_jax.protocol.slow_hosts import HostSpeeds, Slowdown, SlowHost
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.slowdown_estimate import estimate_slowdown
from resilient_jax.worker.host_health import HealthRecord, HostHealth
from resilient_jax.worker.lasting_slowdown import LASTING_EXCHANGES
from tests.support.manual_clock import ManualClock
from tests.support.patience import patience

HOSTS = tuple(HostName(name) for name in "abcd")
NUMBER = GenerationNumber(3)
MICROBATCH_S, REDUCTION_S = 0.1, 0.2
KINDS: tuple[TaskKind, ...] = (TaskKind.FORWARD, TaskKind.BACKWARD)


def find(host: str, factor: float, kind: FindingKind = FindingKind.COMPUTE) -> Finding:
    return Finding(host=host, kind=kind, factor=factor, since_step=5, evidence="")


def tell(reduction_s: float = REDUCTION_S, **factors: float) -> list[list[StepTiming]]:
    """Return what hosts tell of sixteen steps, in which each computes two microbatches."""
    return [
        [
            StepTiming(
                step=step,
                works=(ReplicaWork(0, 2, 2.0, 0.0, 2 * MICROBATCH_S * factors.get(host, 1.0)),),
                wait_s=reduction_s + (0.0 if host == "b" else 0.3),
            )
            for step in range(16)
        ]
        for host in HOSTS
    ]


def estimate(
    *findings: Finding,
    timings: list[list[StepTiming]],
    count: int = 64,
    balanced: bool = True,
    after_loss: DevicesAfterLoss = "even",
):
    return estimate_slowdown(
        NUMBER, HOSTS, findings, timings, count, is_balanced=balanced, after_loss=after_loss
    )


def test_a_slow_processor_costs_no_more_than_its_speed_where_work_is_shared_by_speed():
    found = estimate(find("b", 2.0), timings=tell(b=2.0))
    assert found is not None
    full_s = 16 * MICROBATCH_S + REDUCTION_S
    assert (found.host, found.replaced, found.generation) == ("b", 1.0, NUMBER)
    # 64 microbatches at speeds of 1, 1/2, 1 and 1: 19, 9 and 18 of them, and 18 at most take 1.9 s.
    assert found.kept == pytest.approx(full_s / (19 * MICROBATCH_S + REDUCTION_S))
    assert found.without == pytest.approx(full_s / (22 * MICROBATCH_S + REDUCTION_S))
    assert found.kept > found.without
    even = estimate(find("b", 2.0), timings=tell(b=2.0), balanced=False)
    assert even is not None
    assert even.kept == pytest.approx(full_s / (32 * MICROBATCH_S + REDUCTION_S))
    assert even.kept < even.without == found.without


def test_a_host_too_slow_for_any_share_costs_as_much_as_none():
    timings = tell()
    timings[1] = [StepTiming(step=step, wait_s=REDUCTION_S) for step in range(16)]
    found = estimate(find("b", 100.0), timings=timings, count=8)
    assert found is not None
    assert found.kept == found.without


def test_a_slow_link_costs_what_reductions_take_longer_which_no_share_gives_back():
    found = estimate(find("b", 5.0, FindingKind.LINK), timings=tell(reduction_s=5 * REDUCTION_S))
    assert found is not None
    assert found.kept == pytest.approx((1.6 + 0.2) / (1.6 + 1.0))
    assert found.without == pytest.approx((1.6 + 0.2) / (2.2 + 0.2))
    assert found.without > found.kept


def find_device(factor: float) -> Finding:
    """Return what is found of host b with four devices, of which device 3 is slow."""
    speeds = ((0, 1.0), (1, 1.0), (2, 1.0), (3, 1 / factor))
    return msgspec.structs.replace(find("b", factor), device_speeds=speeds, slow_devices=(3,))


def test_without_a_slow_device_a_host_is_as_fast_as_its_other_devices_together():
    found = estimate(find_device(2.5), timings=tell(b=2.5))
    assert found is not None
    # ResiHP's vector: two devices of four, 0.5 of the host, are faster than all four at 0.4.
    full_s = 16 * MICROBATCH_S + REDUCTION_S
    assert found.devices == (3,)
    assert found.kept == pytest.approx(full_s / (19 * MICROBATCH_S + REDUCTION_S))
    # Speeds of 1, 1/2, 1 and 1.
    assert found.fewer_devices == pytest.approx(full_s / (19 * MICROBATCH_S + REDUCTION_S))
    with_all = estimate(find_device(2.5), timings=tell(b=2.5), after_loss="all")
    assert with_all is not None
    # Speeds of 1, 3/4, 1 and 1: 17, 12, 17 and 18 microbatches.
    assert with_all.fewer_devices == pytest.approx(full_s / (17.5 * MICROBATCH_S + REDUCTION_S), rel=0.05)
    assert with_all.fewer_devices > found.fewer_devices


def test_where_work_is_not_shared_by_speed_it_is_by_the_number_of_devices():
    found = estimate(find_device(2.5), timings=tell(b=2.5), balanced=False)
    assert found is not None
    full_s = 16 * MICROBATCH_S + REDUCTION_S
    assert found.kept == pytest.approx(full_s / (40 * MICROBATCH_S + REDUCTION_S))
    assert found.fewer_devices == pytest.approx(full_s / (19 * MICROBATCH_S + REDUCTION_S))


def test_why_a_slow_host_keeps_all_devices_is_said():
    alike = estimate(find("b", 2.0), timings=tell(b=2.0))
    needed = estimate(find_device(2.5), timings=tell(b=2.5), after_loss="host")
    assert alike is not None
    assert needed is not None
    assert (alike.devices, alike.fewer_devices) == ((), 0.0)
    assert alike.why_all_devices == "no device of it is known to be slower than its other ones"
    assert (needed.devices, needed.fewer_devices) == ((3,), 0.0)
    assert needed.why_all_devices == 'devices_after_loss = "host": it cannot do without a device'


def test_of_several_slow_hosts_the_one_that_costs_most_is_named():
    found = estimate(find("b", 1.5), find("c", 3.0), timings=tell(b=1.5, c=3.0))
    assert found is not None
    assert found.host == "c"
    assert found.kept < found.replaced < 1


def test_what_may_be_the_script_or_is_not_known_leads_to_nothing():
    assert estimate(find("b", 2.0, FindingKind.OTHER), timings=tell(b=2.0)) is None
    assert estimate(timings=tell()) is None
    assert estimate(find("b", 2.0), timings=[[] for _ in HOSTS]) is None


class Shown:
    """What the first host reports."""

    def __init__(self, known: HostSpeeds = ()) -> None:
        self.slow: tuple[SlowHost, ...] = ()
        self.slowdown: Slowdown | None = None
        self.reports = 0
        self.health = HostHealth(
            HOSTS, lambda *_, **__: None, self._show, HealthRecord(NUMBER), ManualClock(), known=known
        )

    def _show(self, found: tuple[tuple[SlowHost, ...], Slowdown | None]) -> None:
        self.reports += found != (self.slow, self.slowdown)
        self.slow, self.slowdown = found

    def take(self, found: Slowdown | None) -> None:
        self.health.estimate_by(lambda *_: found)
        self.health._record.thread.submit(lambda: None).result(timeout=patience(3))


def test_what_a_slow_host_costs_is_reported_once_it_has_lasted_and_then_only_if_it_changes():
    shown = Shown(known=((HostName("b"), 0.5),))  # else nothing of b is reported
    assert [one.host for one in shown.slow] == ["b"]
    chance = random.Random(3)
    for exchange in range(20):
        kept = 0.6 + chance.gauss(0, 0.01)
        shown.take(Slowdown(generation=NUMBER, host=HostName("b"), kept=kept, replaced=1.0))
        assert (shown.slowdown is not None) == (exchange + 1 >= LASTING_EXCHANGES)
    assert shown.reports == 2
    for _ in range(LASTING_EXCHANGES):
        shown.take(Slowdown(generation=NUMBER, host=HostName("b"), kept=0.3, replaced=1.0))
    assert shown.slowdown is not None
    assert shown.slowdown.kept == 0.3
    shown.take(None)
    assert shown.slowdown is None


def test_a_slow_host_that_changes_each_time_is_reported_as_lasting_never():
    shown = Shown(known=((HostName("b"), 0.5), (HostName("c"), 0.5)))
    for host in "bcbcbcbcbc":
        shown.take(Slowdown(generation=NUMBER, host=HostName(host), kept=0.5, replaced=1.0))
        assert shown.slowdown is None


# Pipelines.


def make_shape(hosts=HOSTS, stages: int = 4, blocks: int = 16, **changes) -> PipelineShape:
    return PipelineShape(
        hosts=tuple(hosts),
        block_costs=(1.0,) * blocks,
        num_stages=stages,
        num_microbatches=changes.pop("microbatches", 16),
        schedule=PipelineSchedule.WHOLE_BACKWARD,
        **changes,
    )


def measure(shape: PipelineShape, speeds: HostSpeeds = (), **factors: float) -> TaskSeconds:
    """Return what tasks take where a block takes 10 ms, and a backward pass twice as long."""
    return {
        host: {
            kind: 0.01 * turns * count * factors.get(host, 1.0)
            for kind, turns in zip(KINDS, (1, 2), strict=True)
        }
        for team in make_teams(shape.hosts, shape.block_costs, shape.num_stages, dict(speeds))
        for host, count in team
    }


def estimate_pipeline(shape: PipelineShape, *findings: Finding, speeds: HostSpeeds = (), **factors: float):
    return estimate_pipeline_slowdown(NUMBER, shape, findings, speeds, measure(shape, speeds, **factors))


def test_fewer_layers_on_a_slow_stage_give_most_of_what_it_costs_back():
    found = estimate_pipeline(make_shape(), find("b", 2.5), b=2.5)
    assert found is not None
    assert (found.host, found.speeds) == ("b", ((HostName("b"), 0.4),))
    # 4 blocks at 2.5 times or 2 of them against 4 or 5: 0.4 and 0.8 of the speed, but for the ends.
    assert found.kept < 0.5
    assert 0.75 < found.redivided < 0.85
    assert found.replaced == pytest.approx(1.0)
    assert found.without == 0.0, "a host would have the layers of two stages"


def test_a_host_with_half_the_devices_is_as_fast_as_it_can_be():
    half = {HostName("b"): 0.5}
    shape = make_shape(device_speeds=half)
    measured = measure(shape, tuple(half.items()), b=2.0, c=2.0)
    found = estimate_pipeline_slowdown(NUMBER, shape, [find("c", 2.0)], (), measured)
    assert found is not None
    assert (found.host, found.speeds) == ("c", ((HostName("c"), 0.5),))
    assert found.kept < found.redivided < found.replaced == pytest.approx(1.0)
    assert estimate_pipeline_slowdown(NUMBER, shape, [], (), measured) is None


def test_a_stage_without_its_slow_device_is_priced_as_one_of_fewer_devices():
    """Of four devices one takes 2.5 times as long: all four are as fast as 1.6, the others as 3, or as 2 of them."""
    shape, found = make_shape(stages=2, blocks=8), find("b", 2.5)
    measured = measure(shape, b=2.5)

    def leave(speed: float) -> Slowdown:
        choice = DeviceChoice(out=(3,), used=(0, 1, 2), speed=speed)
        estimated = estimate_pipeline_slowdown(
            NUMBER, shape, [found], (), measured, leave_out=lambda one: choice
        )
        assert estimated is not None
        assert (estimated.devices, estimated.why_all_devices) == ((3,), "")
        return estimated

    three, two, four = leave(0.75), leave(0.5), leave(1.0)
    assert three.kept < two.fewer_devices < three.fewer_devices < three.replaced
    assert four.fewer_devices == pytest.approx(four.replaced)
    refused = estimate_pipeline_slowdown(NUMBER, shape, [found], (), measured, leave_out=lambda one: "why")
    assert refused is not None
    assert (refused.fewer_devices, refused.why_all_devices) == (0.0, "why")


def test_layers_that_are_divided_by_speed_are_left_while_the_host_is_slow():
    speeds = ((HostName("b"), 0.4),)
    found = estimate_pipeline(make_shape(), find("b", 2.5), speeds=speeds, b=2.5)
    assert found is not None
    assert (found.redivided, found.speeds) == (0.0, speeds)
    before = estimate_pipeline(make_shape(), find("b", 2.5), b=2.5)
    assert before is not None
    assert found.kept == pytest.approx(before.redivided), "what was promised is what came"


def test_layers_go_back_when_the_host_is_as_fast_as_its_peers():
    found = estimate_pipeline(make_shape(), speeds=((HostName("b"), 0.4),))
    assert found is not None
    assert (found.host, found.speeds, found.redivided) == ("", (), pytest.approx(1.0))
    assert found.kept < 0.85
    assert estimate_pipeline(make_shape()) is None


def test_a_slow_replica_of_several_gets_less_work_before_layers_move():
    shape = make_shape(stages=2)
    found = estimate_pipeline(shape, find("b", 2.0), b=2.0)
    assert found is not None
    assert 0.7 < found.kept < found.redivided < 1
    even = estimate_pipeline(make_shape(stages=2, is_balanced=False), find("b", 2.0), b=2.0)
    assert even is not None
    assert even.kept < 0.6
    assert found.without > 0


def test_blocks_of_unequal_cost_are_priced_by_what_they_take():
    costs = (8.0, *(1.0,) * 7)
    shape = PipelineShape(
        hosts=HOSTS[:2],
        block_costs=costs,
        num_stages=2,
        num_microbatches=8,
        schedule=PipelineSchedule.WHOLE_BACKWARD,
    )
    measured = {
        host: dict.fromkeys(KINDS, seconds) for host, seconds in zip(HOSTS, (0.08, 0.07), strict=False)
    }
    found = estimate_pipeline_slowdown(NUMBER, shape, [find("a", 3.0)], (), measured)
    assert found is not None
    # The first block alone is more than a third of the work: nothing can move from a to b.
    assert (found.kept, found.redivided) == (pytest.approx(found.redivided), pytest.approx(found.kept))


def test_a_slow_link_of_a_pipeline_costs_what_steps_take_longer_and_other_layers_do_not_help():
    shape = make_shape()
    found = estimate_pipeline_slowdown(
        NUMBER,
        shape,
        [find("b", 5.0, FindingKind.LINK)],
        (),
        measure(shape),
        compute_growth=lambda since_step: 2.0,
    )
    assert found is not None
    assert (found.host, found.speeds, found.redivided) == ("b", (), 0.0)
    assert (found.kept, found.replaced) == (pytest.approx(0.5), pytest.approx(1.0))
    assert found.without == 0.0, "all four have a stage of their own"


def test_a_slow_link_beside_a_slow_stage_costs_what_that_does_not_explain():
    shape = make_shape()
    findings = [find("b", 5.0, FindingKind.LINK), find("c", 2.0)]
    found = estimate_pipeline_slowdown(
        NUMBER, shape, findings, (), measure(shape, c=2.0), compute_growth=lambda since_step: 8.0
    )
    assert found is not None
    assert found.host == "b", "its link costs more than the stage of c"
    assert found.kept == pytest.approx(1 / 8)
    assert found.replaced > 2 * found.kept
    assert dict(found.speeds) == {"c": 0.5}


def test_the_cost_of_a_slow_link_is_not_known_where_no_steps_came_before_it():
    shape = make_shape()
    assert estimate_pipeline(shape, find("b", 5.0, FindingKind.LINK)) is None


def test_what_the_script_or_the_input_does_moves_no_layers():
    for kind in (FindingKind.OTHER, FindingKind.INPUT, FindingKind.LINK):
        assert estimate_pipeline(make_shape(), find("b", 2.5, kind), b=2.5) is None
    measured = {**measure(make_shape(), b=2.5), HostName("c"): {}}
    assert estimate_pipeline_slowdown(NUMBER, make_shape(), [find("b", 2.5)], (), measured) is None


def test_a_cut_by_speed_is_the_best_of_all():
    chance = random.Random(2)
    for _ in range(200):
        blocks, parts = chance.randrange(3, 9), chance.randrange(1, 4)
        costs = [chance.choice((0.5, 1.0, 3.0)) for _ in range(blocks)]
        speeds = [chance.choice((1.0, 0.5, 0.25)) for _ in range(parts)]

        def price(cut: list[int], costs: list[float] = costs, speeds: list[float] = speeds) -> float:
            ends = [0, *itertools.accumulate(cut)]
            pairs = zip(itertools.pairwise(ends), speeds, strict=True)
            return max(sum(costs[first:end]) / speed for (first, end), speed in pairs)

        every = [
            [end - first for first, end in itertools.pairwise((0, *inner, blocks))]
            for inner in itertools.combinations(range(1, blocks), parts - 1)
        ]
        found = cut_by_speed(costs, speeds)
        assert sum(found) == blocks
        assert min(found) >= 1
        assert price(found) == pytest.approx(min(map(price, every)))
