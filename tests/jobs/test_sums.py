"""Sums over hosts, compared with those of one host and of numpy."""

from pathlib import Path

from tests.jobs.launched import JOBS, run_launch


def test_exact_sums_of_three_hosts_have_the_bits_of_one(tmp_path: Path) -> None:
    ended = run_launch(
        [str(JOBS / "sums.py")], tmp_path / "run", hosts=3, options=["--devices-per-host", "2"]
    )
    assert ended.code == 0, ended.last_words
