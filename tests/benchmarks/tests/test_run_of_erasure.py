"""The erasure benchmark runs, and with `--json` prints one line of JSON."""

import json
import subprocess

from tests.benchmarks.paths import COMMAND
from tests.support.agents import SOON_S


def test_the_line_of_json_has_all_figures_and_every_implementation_that_was_timed() -> None:
    words = "erasure --json --data-shards 3 --parity-shards 2 --parity-shards 1 --shard-kib 4 --rounds 2"
    done = subprocess.run(
        [*COMMAND, *words.split()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # the line of JSON is the only output
    for key in ("encode_gbps", "decode_gbps", "copy_limit_gbps"):
        low, high = figures["spread"][key]
        assert 0 < low <= figures[key] <= high
    assert (figures["n"], figures["k"], figures["m"]) == (2, 3, 2)
    assert "one core" in figures["machine"]
    assert figures["kernel"] in figures["speeds"]["1"]
    for speeds in figures["speeds"].values():
        assert {"numpy", "reedsolo", "memory copy"} <= speeds.keys()
        # An optional implementation is timed, or reported as missing.
        assert "zfec" in speeds or figures["missing"]["zfec"] == "not installed"
        assert "bare ISA-L call" in speeds or "isal" in figures["missing"]
    if "isal" not in figures["missing"]:
        assert figures["isal_gbps"] > 0
        assert figures["encode_of_isal"].keys() == figures["decode_of_isal"].keys() == {"1", "2"}
