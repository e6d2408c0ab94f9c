"""All-reduces over hosts, compared with numpy."""

from pathlib import Path

from launched import JOBS, run_launch


def test_ordered_sums_equal_those_of_numpy_bit_for_bit(tmp_path: Path) -> None:
    ended = run_launch(
        [str(JOBS / "sums.py")], tmp_path / "run", hosts=3, options=["--devices-per-host", "2"]
    )
    assert ended.code == 0, ended.last_words
