"""The progress of a script that runs alone: a bar on a terminal, lines in a log. A launcher shows its own."""

import os
import sys
import time
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from resilient_jax.protocol.worker_messages import AGENT_CONNECTION_VARIABLE
from resilient_jax.telemetry.metric_text import format_metrics
from resilient_jax.trainer.step_report import StepReport

REDRAWS_PER_SECOND: Final = 10
LINE_INTERVAL_S: Final = 10.0


def open_progress(num_steps: int) -> "ProgressBar | ProgressLines | None":
    """Return what shows the progress; None under an agent. Call it before the run begins."""
    if AGENT_CONNECTION_VARIABLE in os.environ:
        return None
    return ProgressBar(num_steps) if sys.stdout.isatty() else ProgressLines(num_steps)


class ProgressBar:
    """Step, metrics and remaining time; other output is printed above the bar."""

    def __init__(self, num_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            refresh_per_second=REDRAWS_PER_SECOND,
        )
        self._task = self._progress.add_task("", total=num_steps, metrics="")
        self._metrics: dict[str, float] = {}
        self._progress.start()

    def show(self, report: StepReport) -> None:
        """Show the report's step and metrics; metrics that the report lacks keep their last values."""
        self._metrics.update(report.metrics)
        words = " | ".join(format_metrics(self._metrics))
        self._progress.update(self._task, completed=report.step, metrics=words)

    def close(self) -> None:
        """Leave the last state of the bar on the terminal, and end its thread."""
        self._progress.stop()


class ProgressLines:
    """A line with step and metrics every 10 s, on standard error: standard output is the script's."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._printed_s = time.monotonic()

    def show(self, report: StepReport) -> None:
        """Print the report's step and metrics, unless the last line is too recent."""
        now_s = time.monotonic()
        if now_s - self._printed_s < LINE_INTERVAL_S:
            return
        self._printed_s = now_s
        words = [f"step {report.step} of {self._num_steps}", *format_metrics(report.metrics)]
        sys.stderr.write(" | ".join(words) + "\n")

    def close(self) -> None:
        """Do nothing: every line is complete."""
