"""Orders by which a controller holds or breaks a worker at a place in a step."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import wait_until

from resilient_jax.protocol.failpoints import (
    ANY_STEP,
    Act,
    FaultOrder,
    FaultPointController,
    FaultPoints,
    Hang,
    InjectedFault,
    Place,
    Raise,
    Spoil,
)


def order(act: Act, name: str, step: int = ANY_STEP, index: int = -1) -> FaultOrder:
    return FaultOrder(place=Place.BEFORE_SUM, step=step, hosts=("host-0",), index=index, act=act, name=name)


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_host_is_held_until_it_is_released(tmp_path: Path) -> None:
    controller, points = FaultPointController(tmp_path), FaultPoints(tmp_path, "host-0")
    controller.hold(Place.BEFORE_SUM, ["host-0"], step=3)
    assert points.reach(Place.BEFORE_SUM, 2) is False, "another step"
    assert points.reach(Place.AFTER_SUM, 3) is False, "another place"
    assert FaultPoints(tmp_path, "host-1").reach(Place.BEFORE_SUM, 3) is False, "another host"
    held = in_a_thread(lambda: points.reach(Place.BEFORE_SUM, 3))
    wait_until("the host to come", lambda: controller.held() == {"host-0"})
    assert held.is_alive()
    controller.release()
    held.join(10.0)
    assert not held.is_alive()
    assert controller.held() == frozenset()


def test_orders_of_several_names_hold_side_by_side(tmp_path: Path) -> None:
    controller, points = FaultPointController(tmp_path), FaultPoints(tmp_path, "host-0")
    controller.order(order(Spoil(), "a", step=1))
    controller.order(order(Raise(text="broken"), "b", step=2))
    assert points.reach(Place.BEFORE_SUM, 1) is True
    with pytest.raises(InjectedFault, match="broken"):
        points.reach(Place.BEFORE_SUM, 2)
    controller.release("a")
    assert controller.held("b") == {"host-0"}


def test_what_is_no_hold_is_done_once_by_a_host(tmp_path: Path) -> None:
    controller, points = FaultPointController(tmp_path), FaultPoints(tmp_path, "host-0")
    controller.order(order(Spoil(), "a"))
    assert [points.reach(Place.BEFORE_SUM, step) for step in range(3)] == [True, False, False]
    controller.order(order(Spoil(), "a", index=5))
    assert [points.reach(Place.BEFORE_SUM, 0, index) for index in (4, 5, 5)] == [False, True, False]


def test_a_hang_lasts_as_long_as_it_should(tmp_path: Path) -> None:
    controller, points = FaultPointController(tmp_path), FaultPoints(tmp_path, "host-0")
    controller.order(order(Hang(seconds=0.2), "a"))
    began_s = time.monotonic()
    points.reach(Place.BEFORE_SUM, 0)
    assert time.monotonic() - began_s >= 0.2


def test_without_a_controller_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENT_JAX_FAULT_POINTS", raising=False)
    assert FaultPoints.from_environment("host-0") is None
