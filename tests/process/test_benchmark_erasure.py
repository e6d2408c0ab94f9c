"""The erasure benchmark runs, and its last line is what a machine can read."""

import json
import subprocess

from agents import SOON_S
from benchmarks.paths import COMMAND


def test_the_line_has_the_keys_of_the_figures_and_all_that_was_timed() -> None:
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
    figures = json.loads(done.stdout)  # and nothing else
    for key in ("encode_gbps", "decode_gbps", "copy_limit_gbps"):
        low, high = figures["spread"][key]
        assert 0 < low <= figures[key] <= high
    assert (figures["n"], figures["k"], figures["m"]) == (2, 3, 2)
    assert "one core" in figures["machine"]
    assert figures["kernel"] in figures["speeds"]["1"]
    for speeds in figures["speeds"].values():
        assert {"numpy", "xla", "reedsolo", "memory copy"} <= speeds.keys()
        # What nobody has to install is there, or said to be missing.
        assert "zfec" in speeds or figures["missing"]["zfec"] == "not installed"
        assert "bare ISA-L call" in speeds or "isal" in figures["missing"]
    if "isal" not in figures["missing"]:
        assert figures["isal_gbps"] > 0
        assert figures["encode_of_isal"].keys() == figures["decode_of_isal"].keys() == {"1", "2"}
