"""Orders by which a controller holds or breaks a worker at a failpoint of a step."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient_jax.protocol.failpoints import (
    ANY_STEP,
    CorruptAction,
    Corruption,
    DelayAction,
    FailPoint,
    FailPointAction,
    FailPointController,
    FailPointOrder,
    FailPoints,
    FlipBitAction,
    HangAction,
    InjectedFault,
    RaiseAction,
)
from tests.support.patience import patience, wait_until


def order(act: FailPointAction, name: str, step: int = ANY_STEP, index: int = -1) -> FailPointOrder:
    return FailPointOrder(
        failpoint=FailPoint.BEFORE_REDUCE, step=step, hosts=("host-0",), index=index, action=act, name=name
    )


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_host_is_held_until_it_is_released(tmp_path: Path) -> None:
    controller, points = FailPointController(tmp_path), FailPoints(tmp_path, "host-0")
    controller.hold(FailPoint.BEFORE_REDUCE, ["host-0"], step=3)
    assert points.hit(FailPoint.BEFORE_REDUCE, 2) is Corruption.NONE, "another step"
    assert points.hit(FailPoint.AFTER_REDUCE, 3) is Corruption.NONE, "another place"
    assert FailPoints(tmp_path, "host-1").hit(FailPoint.BEFORE_REDUCE, 3) is Corruption.NONE, "another host"
    held = in_a_thread(lambda: points.hit(FailPoint.BEFORE_REDUCE, 3))
    wait_until("the host to come", lambda: controller.list_held_hosts() == {"host-0"})
    assert held.is_alive()
    controller.release()
    held.join(patience(1))
    assert not held.is_alive()
    assert controller.list_held_hosts() == frozenset()


def test_orders_of_several_names_hold_side_by_side(tmp_path: Path) -> None:
    controller, points = FailPointController(tmp_path), FailPoints(tmp_path, "host-0")
    controller.set_order(order(CorruptAction(), "a", step=1))
    controller.set_order(order(RaiseAction(message="broken"), "b", step=2))
    assert points.hit(FailPoint.BEFORE_REDUCE, 1) is Corruption.NAN
    with pytest.raises(InjectedFault, match="broken"):
        points.hit(FailPoint.BEFORE_REDUCE, 2)
    controller.release("a")
    assert controller.list_held_hosts("b") == {"host-0"}


def test_an_order_other_than_hold_is_executed_once_by_a_host(tmp_path: Path) -> None:
    controller, points = FailPointController(tmp_path), FailPoints(tmp_path, "host-0")
    controller.set_order(order(CorruptAction(), "a"))
    assert [points.hit(FailPoint.BEFORE_REDUCE, step) for step in range(3)] == [
        Corruption.NAN,
        Corruption.NONE,
        Corruption.NONE,
    ]
    controller.set_order(order(CorruptAction(), "a", index=5))
    assert [points.hit(FailPoint.BEFORE_REDUCE, 0, index) for index in (4, 5, 5)] == [
        Corruption.NONE,
        Corruption.NAN,
        Corruption.NONE,
    ]


def test_a_hang_lasts_for_its_duration(tmp_path: Path) -> None:
    controller, points = FailPointController(tmp_path), FailPoints(tmp_path, "host-0")
    controller.set_order(order(HangAction(duration_s=0.2), "a"))
    began_s = time.monotonic()
    points.hit(FailPoint.BEFORE_REDUCE, 0)
    assert time.monotonic() - began_s >= 0.2


def test_a_delay_is_made_at_every_hit_until_the_order_is_gone(tmp_path: Path) -> None:
    controller, points = FailPointController(tmp_path), FailPoints(tmp_path, "host-0")
    controller.set_order(order(DelayAction(delay_s=0.1), "a"))
    began_s = time.monotonic()
    for step in range(3):
        points.hit(FailPoint.BEFORE_REDUCE, step)
    assert time.monotonic() - began_s >= 0.3
    controller.release("a")
    controller.set_order(order(DelayAction(delay_s=3600.0), "a"))
    controller.release("a")
    points.hit(FailPoint.BEFORE_REDUCE, 3)


def test_without_a_controller_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENT_JAX_FAILPOINTS", raising=False)
    assert FailPoints.from_environment("host-0") is None


def test_a_bit_is_flipped_once_or_at_every_hit(tmp_path: Path) -> None:
    controller, points = FailPointController(tmp_path), FailPoints(tmp_path, "host-0")
    controller.set_order(order(FlipBitAction(), "a"))
    found = [points.hit(FailPoint.BEFORE_REDUCE, step) for step in range(3)]
    assert found == [Corruption.BIT_FLIP, Corruption.NONE, Corruption.NONE]
    controller.set_order(order(FlipBitAction(is_repeated=True), "a"))
    assert [points.hit(FailPoint.BEFORE_REDUCE, step) for step in range(3)] == [Corruption.BIT_FLIP] * 3
