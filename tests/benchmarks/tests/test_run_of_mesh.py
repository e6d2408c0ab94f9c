"""The mesh benchmark runs on real hosts, and its bits hold."""

import json
import subprocess

from tests.benchmarks.paths import COMMAND
from tests.support.patience import patience

SMALL = ("--kills", "1", "--windows", "1", "--steps", "20", "--checkpoint-every", "4")


def test_kills_of_hosts_of_a_mesh_are_measured_and_leave_equal_bits() -> None:
    done = subprocess.run(
        [*COMMAND, "mesh", *SMALL, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # the line of JSON is the only output
    assert figures["bitwise_equal"]
    assert figures["bitwise_equal_r1"]
    assert figures["steps_lost"] == 0
    assert figures["stall_s"]["count"] == figures["parity_stall_s"]["count"] == 1
    assert figures["overhead"]["median"] > -1
