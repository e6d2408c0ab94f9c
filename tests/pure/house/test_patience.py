"""Deadlines move on with the machine, each of them, however often that happened before."""

import pytest

from tests.support import patience
from tests.support.patience import FACTOR, Deadline


class Machine:
    """A clock that tests turn on, and how slow the machine is found to be."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slowness = 1.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the machine of a process that has measured nothing yet."""
    found = Machine()
    monkeypatch.setattr(patience, "_slowness", patience._Slowness())
    monkeypatch.setattr(patience, "measure_slowness", lambda: found.slowness)
    monkeypatch.setattr(patience.time, "monotonic", lambda: found.now_s)
    return found


def test_each_wait_is_longer_on_a_machine_that_became_slow(machine: Machine) -> None:
    constant_s = patience.patience(2.0)
    assert constant_s == FACTOR * 2.0
    machine.slowness = 3.0
    for _ in range(2):
        deadline = Deadline(constant_s)
        machine.now_s += constant_s + 1
        assert deadline.find_rest_s() == 2 * constant_s - 1
        machine.now_s += 2 * constant_s
        assert deadline.find_rest_s() == 0


def test_a_wait_ends_on_a_machine_that_is_as_fast_as_before(machine: Machine) -> None:
    deadline = Deadline(patience.patience(2.0))
    machine.now_s += FACTOR * 2.0 + 0.1
    assert deadline.find_rest_s() == 0
