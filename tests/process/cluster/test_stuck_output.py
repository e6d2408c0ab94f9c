"""A job trains on whatever becomes of its output."""

import contextlib
import os
from pathlib import Path

from resilient_jax.protocol.generation import GenerationPhase
from tests.benchmarks.paths import JOBS
from tests.support.patience import wait_until
from tests.support.patient_job import PatientJob

FLOOD_LINES = 6_000
SCRIPT = f"""
import runpy, sys
for number in range({FLOOD_LINES}):
    print("line", number, "x" * 990)
print("the flood is over", flush=True)
runpy.run_path({str(JOBS / "control_stub_worker.py")!r}, run_name="__main__")
"""
"""A worker that prints 6 MB, and then trains by counting."""
TIMEOUTS = 'standby = "off"\nlease_ttl_s = 2.0\n'


def test_a_job_whose_output_nobody_reads_trains_on_and_tells_how_many_lines_were_lost(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text(TIMEOUTS)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "launch.out")
    reader = os.open(tmp_path / "run" / "launch.out", os.O_RDONLY | os.O_NONBLOCK)
    options = ["--devices-per-host", "1", "--zygote", "off", "--config", str(tmp_path / "job.toml")]
    command = [str(tmp_path / "flood.py")]
    with PatientJob(command, num_hosts=2, run_directory=tmp_path / "run", options=options) as job:

        def has_trained() -> bool:
            assert job.exit_code() is None, "the job has ended"
            report = job.read_report()
            return (
                report is not None
                and report.generation is not None
                and report.generation.phase is GenerationPhase.ACTIVE
                and all(host.progress.step >= 5 for host in report.hosts)
            )

        wait_until("training with an output that is full", has_trained)
        found = bytearray()

        def is_read() -> bool:
            with contextlib.suppress(BlockingIOError):
                found.extend(os.read(reader, 2**16))
            return found.count(b"the flood is over") == 2 and b"lines were lost here" in found

        wait_until("the newest lines", is_read)
    os.close(reader)
