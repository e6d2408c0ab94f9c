"""A stall is computed from events as phases that add up."""

import pytest

from resilient_jax.events import Event, EventKind
from resilient_jax.telemetry.stall import measure_stall


def event(kind: EventKind, at_s: float, generation: int | None = None, **detail: str | int) -> Event:
    return Event(
        kind=kind, host="h", monotonic_s=at_s, wall_s=at_s, generation=generation, step=7, detail=dict(detail)
    )


def phase(name: str, at_s: float, generation: int) -> Event:
    return event(EventKind.GENERATION_PHASE, at_s, generation, phase=name, change="shrink", hosts=2)


STORY = [
    phase("active", 1.0, 1),
    event(EventKind.STEP_COMMITTED, 1.5, 1),
    event(EventKind.WORKER_EXITED, 10.1),
    phase("quiesce", 10.12, 2),
    phase("form", 10.2, 2),
    phase("active", 10.5, 2),
    event(EventKind.STEP_COMMITTED, 10.9, 2),
    event(EventKind.STEP_COMMITTED, 11.0, 2),
]


def test_phases_add_up_to_the_stall() -> None:
    stall = measure_stall(STORY, 10.0)
    assert stall is not None
    assert stall.detected_by is EventKind.WORKER_EXITED
    phases = (stall.detection_s, stall.quiesce_s, stall.rebuild_s, stall.step_s)
    assert phases == pytest.approx((0.1, 0.1, 0.3, 0.5))
    assert stall.total_s == pytest.approx(1.0)
    assert (stall.change, stall.generation, stall.num_hosts, stall.step) == ("shrink", 2, 2, 7)


def test_a_stall_lasts_until_every_member_has_done_a_step() -> None:
    assert measure_stall(STORY[:-1], 10.0) is None


def test_a_generation_that_failed_again_is_part_of_the_stall() -> None:
    again = [
        *STORY[:-2],
        phase("quiesce", 12.0, 3),
        phase("form", 12.1, 3),
        phase("active", 12.2, 3),
        event(EventKind.STEP_COMMITTED, 12.5, 3),
        event(EventKind.STEP_COMMITTED, 12.6, 3),
    ]
    stall = measure_stall(again, 10.0)
    assert stall is not None
    assert stall.generation == 3
    assert stall.total_s == pytest.approx(2.6)
