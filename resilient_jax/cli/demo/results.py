"""What a training script says when it ends, broken or undisturbed; and the table of what happened on the way."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from rich.table import Table

from resilient_jax.cli.demo.scenarios import HOSTS, Recovery
from resilient_jax.errors import InternalError


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingResult:
    """The script's last words."""

    loss: str
    digest: str


def parse_result(output: str) -> TrainingResult:
    """The last words in a script's output.

    Raises:
        InternalError: there are none.
    """
    losses = re.findall(r"final loss ([0-9.]+)", output)
    digests = re.findall(r"sha256 of the parameters ([0-9a-f]{64})", output)
    if not losses or not digests:
        raise InternalError(f"the script printed no final loss or digest:\n{output[-2000:]}")
    return TrainingResult(losses[-1], digests[-1])


def train_without_faults(command: Sequence[str], devices: int) -> TrainingResult:
    """One process, the same program, the same data: what must come out."""
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise InternalError(f"the undisturbed run failed:\n{done.stderr[-2000:]}")
    return parse_result(done.stdout)


def tabulate_recoveries(incidents: Sequence[Recovery], devices: int) -> Table:
    """A row for each incident."""
    table = Table(title="what was killed, and how training went on (times in ms)")
    table.add_column("incident", ratio=1)
    table.add_column("noticed by")
    for name in ("notice", "quiesce", "rebuild", "next step", "stall"):
        table.add_column(name, justify="right")
    table.add_column("how")
    table.add_column("MiB from memory, decoded", justify="right")
    table.add_column("restored in", justify="right")
    table.add_column("steps lost", justify="right")
    table.add_column("live devices", justify="right")
    for incident in incidents:
        stall = incident.stall
        phases = (stall.detection_s, stall.quiesce_s, stall.rebuild_s, stall.step_s, stall.total_s)
        has_restored = incident.snapshot_bytes + incident.decoded_bytes > 0
        table.add_row(
            incident.fault,
            str(stall.detected_by),
            *(f"{1000 * seconds:.0f}" for seconds in phases),
            stall.change,
            f"{incident.snapshot_bytes / 2**20:.1f}, {incident.decoded_bytes / 2**20:.1f}"
            if has_restored
            else "-",
            f"{1000 * incident.restore_s:.0f}" if has_restored else "-",
            str(incident.steps_lost),
            f"{stall.num_hosts * devices} of {HOSTS * devices}",
        )
    return table
