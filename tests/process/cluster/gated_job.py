"""`launch` of two hosts with workers without JAX, whose agents a test keeps from starting."""

import os
from pathlib import Path

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.protocol.generation import GenerationPhase
from tests.benchmarks.paths import JOBS
from tests.support.patience import wait_until
from tests.support.patient_job import PatientJob

STUB = str(JOBS / "control_stub_worker.py")
GATE = """
if [ -e "$1" ]; then exit "$(cat "$1")"; fi
shift
exec "$@"
"""
"""Stands before each agent's command: the agent ends with the code in a file of its host, if there is one."""


class GatedJob:
    """`launch` of two hosts with stub workers, whose agents end at their start with a code that a test chooses."""

    def __init__(self, work: Path) -> None:
        self._work = work
        (work / "gate.sh").write_text(GATE)
        (work / "job.toml").write_text(
            'standby = "off"\nlease_ttl_s = 2.0\nmin_hosts = 1\nmax_restarts = 1\n'
        )
        sites = [
            f'[[sites]]\naddress = "127.0.0.{index + 2}"\n'
            f'command_prefix = ["sh", "{work}/gate.sh", "{work}/host-{index}.code"]\n'
            for index in range(2)
        ]
        (work / "sites.toml").write_text("".join(sites))
        options = ["--devices-per-host", "1", "--host-restart-delay", "0", "--zygote", "off"]
        options += ["--config", str(work / "job.toml"), "--sites", str(work / "sites.toml")]
        self.job = PatientJob([STUB], num_hosts=2, run_directory=work / "run", options=options)

    def refuse(self, host: str, code: int) -> None:
        """Have the host's next agents end with this code."""
        (self._work / "code").write_text(str(code))
        os.replace(self._work / "code", self._work / f"{host}.code")

    def let_in(self, host: str) -> None:
        """Have the host's next agent start."""
        (self._work / f"{host}.code").unlink()

    def read_tail(self) -> str:
        """Return the end of what `launch` has printed, if its file is still there."""
        return self.job.read_tail() if self.job.output_path.exists() else "its output was removed"

    def wait_members(self, *hosts: str) -> None:
        """Wait until these hosts train."""

        def train() -> bool:
            report: JobReport | None = self.job.read_report()
            generation = report.generation if report is not None else None
            assert self.job.exit_code() is None, self.read_tail()
            return (
                generation is not None
                and generation.phase is GenerationPhase.ACTIVE
                and sorted(member.host for member in generation.membership.members) == sorted(hosts)
            )

        wait_until(f"{hosts} train", train)

    def wait_said(self, words: str) -> None:
        """Wait until `launch` has printed these words; fail if it ends."""

        def is_said() -> bool:
            said = words in self.job.read_output()
            assert said or self.job.exit_code() is None, self.read_tail()
            return said

        wait_until(f"{words!r} is printed", is_said)
