"""The snapshot benchmark runs with real servers, and with `--json` prints one line of JSON."""

import json
import subprocess

from tests.benchmarks.paths import COMMAND
from tests.support.patience import patience

LIMIT_S = patience(28)


def test_the_line_of_json_has_all_figures_and_every_case_that_was_timed() -> None:
    done = subprocess.run(
        [*COMMAND, "snapshot", "--json", "--sizes", "1", "--rounds", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # the line of JSON is the only output
    keys = ["capture_gbps", "copy_limit_gbps", "blocking_ms_per_gb", "parity_restore_s", "orbax_restore_s"]
    for key in keys:
        low, high = figures["spread"][key]
        assert 0 < low <= figures[key] <= high
    assert (figures["n"], figures["skipped"]) == (1, {})
    assert figures["commit_s"].keys() == {f"{n} hosts, m = {m}" for n in (4, 8) for m in (1, 2)} | {
        "8 hosts, m = 4"
    }
    (seconds,) = figures["seconds"].values()
    assert seconds["restore"].keys() == {"local arena", "peer", "parity", "parity, all by one"}
    assert seconds["orbax restore"].keys() == {"tmpfs", "disk"}
    assert seconds["orbax save"].keys() == seconds["orbax blocking"].keys() == {"tmpfs", "disk"}
    for m in ("1", "2", "4"):
        memory = figures["memory_per_byte"][m]
        # With so small a state, the overhead of pages and manifests is large.
        assert memory["formula"] < memory["measured"] < 2 * memory["formula"]
