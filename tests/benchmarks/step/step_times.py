"""Step times of several training loops of one model, in interleaved windows."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from resilient_jax.errors import InternalError
from tests.benchmarks.runs import HOSTS, read_times, run_bare, run_undisturbed

SMALL: Final = "microbatch=1"
WITHOUT_SNAPSHOTS: Final = 'replicated_snapshot_interval_steps = "off"\n'
"""The sums are measured; a window is about as long as a generation measures its snapshots, whose cost is in `stall`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One way to train the model.

    Attributes:
        name: in tables and in the line of JSON.
        arguments: of the script.
        bare: whether the loop does without this package.
    """

    name: str
    arguments: tuple[str, ...]
    bare: bool = False


BARE: Final = Loop(name="bare", arguments=("bare",), bare=True)
FAST: Final = Loop(name="fast", arguments=("trainer", "fast", "microbatch=4"))
EXACT: Final = Loop(name="exact", arguments=("trainer", "microbatch=4"))
FAST_SMALL: Final = Loop(name="fast, 1 sequence a microbatch", arguments=("trainer", "fast", SMALL))
EXACT_SMALL: Final = Loop(name="exact, 1 sequence a microbatch", arguments=("trainer", SMALL))
LOOPS: Final = (BARE, FAST, EXACT, FAST_SMALL, EXACT_SMALL)


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one process needed.

    Attributes:
        peak_rss_mib: peak resident memory, compilation included.
        sent_bytes: what all processes of the machine sent to each other during a step; 0: too few steps.
    """

    peak_rss_mib: float
    sent_bytes: float


@dataclasses.dataclass(slots=True)
class LoopTimes:
    """Measurements of one loop.

    Attributes:
        windows: step times in seconds, of each window.
        usage: of each process of each window.
    """

    windows: list[Sequence[float]] = dataclasses.field(default_factory=list)
    usage: list[ProcessUsage] = dataclasses.field(default_factory=list)

    @property
    def times_s(self) -> list[float]:
        """The step times of all windows."""
        return [time_s for window in self.windows for time_s in window]

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.times_s)

    @property
    def peak_rss_mib(self) -> float:
        """Median over processes of the peak resident memory."""
        return statistics.median(found.peak_rss_mib for found in self.usage)

    @property
    def sent_bytes(self) -> float:
        """Median over processes of what a host sends in a step."""
        return statistics.median(found.sent_bytes for found in self.usage) / HOSTS


def measure_steps(
    script: Path, work: Path, steps: int, windows: int, console: Console
) -> Mapping[Loop, LoopTimes]:
    """Measure one window of each loop per round, every other round in reverse: a steady drift affects all alike."""
    found = {loop: LoopTimes() for loop in LOOPS}
    for window, loop in itertools.chain.from_iterable(_turn(window) for window in range(windows)):
        folder = work / f"window-{window}-{LOOPS.index(loop)}"
        command = [str(script), loop.arguments[0], str(steps), str(folder / "times"), *loop.arguments[1:]]
        if loop.bare:
            run_bare(command, folder)
        else:
            run_undisturbed(command, folder, config=WITHOUT_SNAPSHOTS)
        times_s = read_times(folder)
        if not times_s:
            raise InternalError(f"{folder}: found no step times of the loop {loop.name}, expected some")
        found[loop].windows.append(times_s)
        found[loop].usage += _read_usage(folder)
        console.print(f"  window {window + 1}, {loop.name}: {statistics.median(times_s):.3f} s a step")
    return found


def _turn(window: int) -> Sequence[tuple[int, Loop]]:
    return [(window, loop) for loop in (LOOPS if window % 2 == 0 else LOOPS[::-1])]


def _read_usage(folder: Path) -> list[ProcessUsage]:
    return [msgspec.json.decode(path.read_bytes(), type=ProcessUsage) for path in folder.glob("usage-*.json")]
