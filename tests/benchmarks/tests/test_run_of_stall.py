"""The stall benchmark's kills of a trainer's job run on real hosts."""

import io
import math

from rich.console import Console

from tests.benchmarks.paths import JOBS
from tests.benchmarks.stall.trainer_stalls import SHARDED, measure_trainer_stall


def test_a_kill_of_a_sharded_job_is_timed_and_printed(tmp_path) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    found = measure_trainer_stall(JOBS / "trainer_job.py", tmp_path, SHARDED, 1, console)
    assert math.isfinite(found)
    assert "1: host-0, sharded, " in printed.getvalue()
