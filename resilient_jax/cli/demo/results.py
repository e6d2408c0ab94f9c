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
from resilient_jax.events import EventKind

RUN_TIMEOUT_S: Final = 600.0
MIB: Final = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingResult:
    """The final loss, as printed, and the SHA-256 of all weights; None: no host had all of them."""

    loss: str
    digest: str | None


def parse_result(output: str) -> TrainingResult:
    """Return the last result in a script's output.

    Raises:
        InternalError: the output has none.
    """
    losses = re.findall(r"final loss ([0-9.]+)", output)
    digests = re.findall(r"sha256 of the parameters ([0-9a-f]{64})", output)
    if not losses:
        raise InternalError(f"the script printed no final loss:\n{output[-2000:]}")
    return TrainingResult(losses[-1], digests[-1] if digests else None)


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


def tabulate_recoveries(recoveries: Sequence[Recovery]) -> Table:
    """Return a table with a row for each recovery.

    The column of restored bytes is left out where no recovery restored any from snapshots.
    """
    is_restored = any(_restored_bytes(recovery) for recovery in recoveries)
    table = Table(
        title="what was killed, and how training resumed (times in ms)", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("fault", ratio=1)
    table.add_column("detected by", no_wrap=True)
    for name in ("detect", "quiesce", "rebuild", "step", "= stall"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_restored:
        table.add_column("restored\nMiB", justify="right", no_wrap=True)
    table.add_column("steps\nlost", justify="right", no_wrap=True)
    table.add_column("devices\nleft", justify="right", no_wrap=True)
    for recovery in recoveries:
        stall = recovery.stall
        phases = (stall.detection_s, stall.quiesce_s, stall.rebuild_s, stall.step_s, stall.total_s)
        table.add_row(
            recovery.fault,
            _SIGNS[stall.detected_by],
            *(f"{1000 * seconds:.0f}" for seconds in phases),
            *([f"{_restored_bytes(recovery) / MIB:.1f}"] if is_restored else ()),
            str(recovery.steps_lost),
            f"{stall.num_hosts * recovery.devices_per_host} of {NUM_HOSTS * recovery.devices_per_host}",
        )
    return table


def _restored_bytes(recovery: Recovery) -> int:
    return recovery.snapshot_bytes + recovery.decoded_bytes


_SIGNS: Final = {
    EventKind.WORKER_EXITED: "process exit",
    EventKind.WORKER_DYING: "closed pipe",
    EventKind.WORKER_UNRESPONSIVE: "silence",
    EventKind.HOST_LOST: "expired lease",
    EventKind.HOST_FOUND_DEAD: "closed port",
    EventKind.COLLECTIVE_FAILED: "broken connection",
    EventKind.COORDINATION_SERVICE_EXITED: "service exit",
}
"""What the first event that reports a fault saw of the fault."""
