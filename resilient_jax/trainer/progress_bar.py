"""A progress bar for a script that runs alone on a terminal; under an agent the launcher shows one."""

import os
import sys
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from resilient_jax.protocol.worker_messages import AGENT_CONNECTION_VARIABLE
from resilient_jax.trainer.step_report import StepReport

REDRAWS_PER_SECOND: Final = 10


def is_progress_wanted() -> bool:
    """Return whether stdout is a terminal and no launcher shows progress. Call it before the run begins."""
    return AGENT_CONNECTION_VARIABLE not in os.environ and sys.stdout.isatty()


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
        words = " | ".join(f"{name} {value:.4f}" for name, value in self._metrics.items())
        self._progress.update(self._task, completed=report.step, metrics=words)

    def close(self) -> None:
        """Leave the last state of the bar on the terminal, and end its thread."""
        self._progress.stop()
