"""The results that the demo's training script prints, and the table of recoveries."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from rich.table import Table

from resilient_jax.cli.demo.scenarios import NUM_HOSTS, Recovery
from resilient_jax.errors import InternalError

RUN_TIMEOUT_S: Final = 600.0
MIB: Final = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingResult:
    """The final loss, as printed, and the SHA-256 of all weights."""

    loss: str
    digest: str


def parse_result(output: str) -> TrainingResult:
    """Return the last result in a script's output.

    Raises:
        InternalError: the output has none.
    """
    losses = re.findall(r"final loss ([0-9.]+)", output)
    digests = re.findall(r"sha256 of the parameters ([0-9a-f]{64})", output)
    if not losses or not digests:
        raise InternalError(f"the script printed no final loss or digest:\n{output[-2000:]}")
    return TrainingResult(losses[-1], digests[-1])


def train_without_faults(command: Sequence[str], devices: int) -> TrainingResult:
    """Return the expected result: the same program on the same data in one process.

    Raises:
        InternalError: the script failed.
    """
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise InternalError(f"the run without faults failed:\n{done.stderr[-2000:]}")
    return parse_result(done.stdout)


def tabulate_recoveries(recoveries: Sequence[Recovery], devices: int) -> Table:
    """Return a table with a row for each recovery of a job with so many devices per host."""
    table = Table(title="what was killed, and how training resumed (times in ms)")
    table.add_column("fault", ratio=1)
    table.add_column("detected by")
    for name in ("detection", "quiesce", "rebuild", "next step", "stall"):
        table.add_column(name, justify="right")
    table.add_column("how")
    table.add_column("MiB from memory, decoded", justify="right")
    table.add_column("restored in", justify="right")
    table.add_column("steps lost", justify="right")
    table.add_column("live devices", justify="right")
    for recovery in recoveries:
        stall = recovery.stall
        phases = (stall.detection_s, stall.quiesce_s, stall.rebuild_s, stall.step_s, stall.total_s)
        restored = ("-", "-")
        if recovery.snapshot_bytes + recovery.decoded_bytes > 0:
            amounts = f"{recovery.snapshot_bytes / MIB:.1f}, {recovery.decoded_bytes / MIB:.1f}"
            restored = (amounts, f"{1000 * recovery.restore_s:.0f}")
        table.add_row(
            recovery.fault,
            str(stall.detected_by),
            *(f"{1000 * seconds:.0f}" for seconds in phases),
            stall.change,
            *restored,
            str(recovery.steps_lost),
            f"{stall.num_hosts * devices} of {NUM_HOSTS * devices}",
        )
    return table
