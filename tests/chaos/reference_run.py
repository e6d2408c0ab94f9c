"""The reference run: the same script without faults, on one host or a replica's, which gives the expected result."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.errors import CallerError
from resilient_jax.protocol.ledger import LEDGER_VARIABLE
from tests.chaos.ledger_invariants import ReferenceStep, read_reference
from tests.chaos.ledgers import tail_ledger
from tests.chaos.manifest import ChaosJob, expand_command

STOP_STEP_VARIABLE = "RESILIENT_JAX_CHAOS_STOP_STEP"
"""Environment variable with the path of the file in which a script without a fixed length reads when to stop."""
RUN_TIMEOUT_S = 1800.0


class ReferenceRun:
    """The steps of the reference run, which is repeated with more steps when more are needed.

    Attributes:
        steps: the steps so far, by their index.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str], job: ChaosJob
    ) -> None:
        """Set up the run; `environment` is the script's, without the variables of stop file and ledger."""
        self._command = command
        self._job = job
        self._directory = directory
        self._environment = environment
        self.steps: Mapping[int, ReferenceStep] = self._read()

    def extend_to(self, steps: int) -> Mapping[int, ReferenceStep]:
        """Return the first `steps` steps at least, or all if the script ends before; none without such a run.

        Raises:
            CallerError: the script fails even without faults.
        """
        if len(self.steps) < steps and self._job.reference_hosts:
            self._run(steps)
            self.steps = self._read()
        return self.steps

    def _read(self) -> Mapping[int, ReferenceStep]:
        return read_reference(tail_ledger(self._directory / "ledger").poll())

    def _run(self, steps: int) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        end = self._directory / "end"
        end.write_text(str(steps))
        command = expand_command(self._command, self._directory)
        environment = {
            **self._environment,
            "JAX_PLATFORMS": "cpu",
            LEDGER_VARIABLE: str(self._directory / "ledger"),
            STOP_STEP_VARIABLE: str(end),
        }
        try:
            done = subprocess.run(
                bind_to_this_process([sys.executable, *self._make_launch(), *command]),
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired as late:
            raise CallerError(
                f"{command[0]}: found it still training after {RUN_TIMEOUT_S / 60:.0f} minutes without faults, "
                f"expected an end after step {steps}: it has to stop at the step in the file that "
                f"{STOP_STEP_VARIABLE} names (see tests/chaos/jobs/chaos_job.py), or after --steps (job.steps in a "
                "manifest) of itself"
            ) from late
        if done.returncode:
            raise CallerError(
                f"{command[0]}: found exit code {done.returncode} of a run without faults, expected 0; a "
                f"campaign compares with it. Make `python {' '.join(command)}` work first:\n"
                f"{done.stderr[-2000:]}"
            )

    def _make_launch(self) -> list[str]:
        """Return the arguments before the script: none for a run of one process."""
        if self._job.reference_hosts == 1:
            return []
        launch = ["-m", "resilient_jax.cli.main", "launch", "--hosts", str(self._job.reference_hosts)]
        launch += ["--devices-per-host", str(self._job.devices_per_host)]
        return [*launch, "--run-dir", str(self._directory / "run"), "--"]
