"""The progress line of a job: redrawn in place on a terminal, printed every 10 s in a log."""

import sys
import time
from types import TracebackType
from typing import Self

from resilient_jax.cluster.job_view import JobView
from resilient_jax.protocol.records import Generation, GenerationPhase
from resilient_jax.telemetry.metric_text import format_metrics
from resilient_jax.telemetry.screen_output import print_bytes

REDRAW_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0
CLEAR_LINE = "\r\x1b[2K"


class ProgressLine:
    """A line with step, loss, generation and live hosts; other output is printed above the line."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._text = ""
        self._printed = ""
        self._drawn_s = 0.0

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
        self._text = describe_progress(view)
        now = time.monotonic()
        interval_s = REDRAW_INTERVAL_S if self._on_terminal else LOG_INTERVAL_S
        if now - self._drawn_s < interval_s:
            return
        self._drawn_s, self._printed = now, self._text
        _show(CLEAR_LINE + self._text if self._on_terminal else self._text + "\n")


def _show(text: str) -> None:
    print_bytes(text.encode(errors="replace"))


def describe_members(generation: Generation) -> str:
    """Return how many hosts train, such as "3 hosts live"."""
    count = len(generation.members)
    return f"{count} host{'' if count == 1 else 's'} live"


def describe_progress(view: JobView) -> str:
    """Return the progress line of a job."""
    generation = view.generation
    if generation is None:
        return "waiting for hosts"
    words = [f"step {view.step}"]
    words += format_metrics(view.metrics)
    words += [f"generation {generation.number}", describe_members(generation)]
    if generation.phase not in (GenerationPhase.ACTIVE, GenerationPhase.FINISHED):
        words.append(f"{generation.phase} ({generation.reason})")
    return " | ".join(words)
