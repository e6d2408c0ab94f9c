"""An event loop that never waits: when all its tasks do, its clock goes on to the first timer.

What a store or a session does with time is tested to the millisecond, on any machine, and takes none.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tests.support.manual_clock import ManualClock

ROUND_S: Final = 1e-6


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: moves the clock on instead. Each round of the loop takes a microsecond, as in real time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        assert found or timeout is not None, "every task waits, and no timer is set: this would hang"
        self._clock.advance(ROUND_S if found or timeout is None else max(ROUND_S, timeout))
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_JumpingSelector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic_s()


def run_in_virtual_time(main: Callable[[ManualClock], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function in such a loop, whose clock it gets; it may wait for nothing outside this process."""
    clock = ManualClock()
    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(clock)) as runner:
        runner.run(main(clock))
