"""`tests/run.py`, as `make test` calls it: what it passes on to pytest does what it is for."""

import subprocess
import sys
from pathlib import Path

from tests.run import A_FILE_STAYS_TOGETHER
from tests.support.patience import patience

FILE = """
import os
import pathlib
import pytest

@pytest.mark.parametrize("number", range(6))
def test_where(number):
    with (pathlib.Path(__file__).parent / (pathlib.Path(__file__).stem + ".workers")).open("a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_the_tests_of_a_file_share_a_process_and_files_do_not(tmp_path: Path) -> None:
    """Else a job would be started once in each process. A new pytest or xdist can change it without a word."""
    names = [f"test_{letter}" for letter in "abcdef"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(FILE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            *A_FILE_STAYS_TOGETHER,
            "-p",
            "no:cacheprovider",
            ".",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(10),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    workers = [(tmp_path / f"{name}.workers").read_text().split() for name in names]
    assert all(len(found) == 6 and len(set(found)) == 1 for found in workers), workers
    assert len({found[0] for found in workers}) == 2, workers
