"""The run that nobody disturbs: the same script on this machine alone, for what must come out."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.chaos.ledger_invariants import ReferenceStep, read_reference
from resilient_jax.chaos.manifest import expand_command
from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.errors import CallerError
from resilient_jax.protocol.ledger import LEDGER_VARIABLE, read_ledger

STOP_STEP_VARIABLE = "RESILIENT_JAX_CHAOS_STOP_STEP"
"""Environment variable with the file that says at which step a script without a fixed length stops."""
RUN_TIMEOUT_S = 1800.0


class ReferenceRun:
    """The steps of an undisturbed run, made when they are first needed and longer when they do not reach.

    Attributes:
        steps: those that are known so far, by their index.
    """

    def __init__(self, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        """`environment` is all that the script gets, besides what tells it where to stop and where to write."""
        self._command = command
        self._directory = directory
        self._environment = environment
        self.steps: Mapping[int, ReferenceStep] = self._read()

    def extend_to(self, steps: int) -> Mapping[int, ReferenceStep]:
        """At least so many steps, or all if the script ends before.

        Raises:
            CallerError: the script fails when nobody disturbs it.
        """
        if len(self.steps) < steps:
            self._run(steps)
            self.steps = self._read()
        return self.steps

    def _read(self) -> Mapping[int, ReferenceStep]:
        return read_reference(read_ledger((self._directory / "ledger").glob("*.jsonl")))

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
                bind_to_this_process([sys.executable, *command]),
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired as late:
            raise CallerError(
                f"{command[0]}: found it still training after {RUN_TIMEOUT_S / 60:.0f} minutes undisturbed, expected "
                f"an end after step {steps}: it has to stop where the file named in {STOP_STEP_VARIABLE} says (see "
                "examples/chaos_job.py), or after --steps (job.steps in a manifest) of itself"
            ) from late
        if done.returncode:
            raise CallerError(
                f"{command[0]}: found exit code {done.returncode} of a run that nobody disturbs, expected 0; a "
                f"campaign compares with it. Make `python {' '.join(command)}` work first:\n"
                f"{done.stderr[-2000:]}"
            )
