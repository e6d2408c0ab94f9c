"""The progress line of a job: redrawn in place on a terminal, printed every 10 s in a log."""

import collections
import sys
import time
from types import TracebackType
from typing import Self

from resilient_jax.cluster.job_view import JobView
from resilient_jax.policy.score import describe_s
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.telemetry.metric_text import format_metrics
from resilient_jax.telemetry.screen_output import print_bytes

REDRAW_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0
RATE_WINDOW_S = 60.0
"""Steps per second are those of the last minute: what a failure costs is in them, and an hour later no longer."""
CLEAR_LINE = "\r\x1b[2K"


class StepRate:
    """How many steps a job commits per second."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def measure(self, step: int, now_s: float) -> float | None:
        """Return the steps per second of the last minute, pauses included; None before the second step that is seen.

        Before the first step hosts are awaited and programs compiled, which is no speed.

        >>> rate = StepRate()
        >>> rate.measure(4, now_s=0.0), rate.measure(5, now_s=1.0), rate.measure(5, now_s=2.0)
        (None, 1.0, 0.5)
        """
        if not step:
            return None
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((now_s, step))
        while len(self._seen) > 2 and self._seen[1][0] < now_s - RATE_WINDOW_S:
            self._seen.popleft()
        began_s, first = self._seen[0]
        return (step - first) / (now_s - began_s) if step > first and now_s > began_s else None


class ProgressLine:
    """A line with step, speed, time left, loss, generation and live hosts; other output is printed above the line."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._text = ""
        self._printed = ""
        self._drawn_s = 0.0
        self._rate = StepRate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_terminal and self._text:
            _show(f"{CLEAR_LINE}{self._text}\n")
        elif self._text != self._printed:
            _show(f"{self._text}\n")

    def print_line(self, line: bytes) -> None:
        """Print a line of a host's output above the progress line."""
        text = line.decode(errors="replace")
        _show(f"{CLEAR_LINE}{text}\n{self._text}" if self._on_terminal else text + "\n")

    def update(self, view: JobView) -> None:
        """Show the job's new progress, unless the line was drawn too recently."""
        now = time.monotonic()
        self._text = describe_progress(view, self._rate.measure(view.progress.step, now))
        interval_s = REDRAW_INTERVAL_S if self._on_terminal else LOG_INTERVAL_S
        if now - self._drawn_s < interval_s:
            return
        self._drawn_s, self._printed = now, self._text
        _show(CLEAR_LINE + self._text if self._on_terminal else self._text + "\n")


def _show(text: str) -> None:
    print_bytes(text.encode(errors="replace"))


def describe_members(generation: Generation) -> str:
    """Return how many hosts train, such as "3 hosts live"."""
    count = len(generation.membership.members)
    return f"{count} host{'' if count == 1 else 's'} live"


def describe_steps(step: int, num_steps: int, steps_per_s: float | None) -> list[str]:
    """Return how far a job is, such as ["step 12 of 60", "1.5 steps/s", "32 s left"], as far as that is known.

    Args:
        step: number of committed steps.
        num_steps: steps of the whole job; 0: not known.
        steps_per_s: None: not known.
    """
    words = [f"step {step} of {num_steps}" if num_steps else f"step {step}"]
    if steps_per_s:
        words.append(f"{steps_per_s:.3g} steps/s")
        if num_steps > step:
            words.append(f"{describe_s((num_steps - step) / steps_per_s)} left")
    return words


def describe_progress(view: JobView, steps_per_s: float | None) -> str:
    """Return the progress line of a job."""
    generation = view.generation
    if generation is None:
        return "waiting for hosts"
    words = describe_steps(view.progress.step, view.progress.num_steps, steps_per_s)
    words += format_metrics(view.progress.metrics)
    words += [f"generation {generation.number}", describe_members(generation)]
    if generation.phase not in (GenerationPhase.ACTIVE, GenerationPhase.FINISHED):
        words.append(f"{generation.phase} ({generation.reason})")
    return " | ".join(words)
