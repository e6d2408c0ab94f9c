"""The run that nobody disturbs: the same script on this machine alone, for what must come out."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.chaos.commits import Digest, read_reference
from resilient_jax.chaos.manifest import fill_in
from resilient_jax.errors import CallerError
from resilient_jax.protocol.ledger import LEDGER_VARIABLE, read_ledger

END_VARIABLE = "RESILIENT_JAX_CHAOS_END"
"""Environment variable with the file that says at which step a script without a fixed length stops."""
DEADLINE_S = 1800.0


class Reference:
    """Digests of an undisturbed run, made when they are first needed and longer when they do not reach."""

    def __init__(
        self, command: Sequence[str], directory: Path, devices: int, environment: Mapping[str, str]
    ) -> None:
        self._command = command
        self._directory = directory
        self._devices = devices
        self._environment = environment
        self.digests: Mapping[int, Digest] = self._read()

    def reach(self, steps: int) -> Mapping[int, Digest]:
        """The digests of at least so many steps, or of all if the script ends before.

        Raises:
            CallerError: the script fails when nobody disturbs it.
        """
        if len(self.digests) < steps:
            self._run(steps)
            self.digests = self._read()
        return self.digests

    def _read(self) -> Mapping[int, Digest]:
        return read_reference(read_ledger((self._directory / "ledger").glob("*.jsonl")))

    def _run(self, steps: int) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        end = self._directory / "end"
        end.write_text(str(steps))
        command = fill_in(self._command, self._directory)
        environment = {
            **os.environ,
            **self._environment,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self._devices}",
            "JAX_PLATFORMS": "cpu",
            LEDGER_VARIABLE: str(self._directory / "ledger"),
            END_VARIABLE: str(end),
        }
        try:
            done = subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                check=False,
                timeout=DEADLINE_S,
                env=environment,
            )
        except subprocess.TimeoutExpired as late:
            raise CallerError(
                f"{command[0]}: found it still training after {DEADLINE_S / 60:.0f} minutes undisturbed, expected an "
                f"end after step {steps}: it has to stop where the file named in {END_VARIABLE} says (see "
                "examples/chaos_job.py), or after --steps (job.steps in a manifest) of itself"
            ) from late
        if done.returncode:
            raise CallerError(
                f"{command[0]}: found exit code {done.returncode} of a run that nobody disturbs, expected 0; a "
                f"campaign compares with it. Make `python {' '.join(command)}` work first:\n"
                f"{done.stderr[-2000:]}"
            )
