"""Where the benchmarks find the files of the source tree that they run."""

import sys
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
TESTS: Final = REPOSITORY / "tests"
JOBS: Final = TESTS / "benchmarks" / "jobs"
"""Scripts that run as processes of their own."""
COMMAND: Final = (sys.executable, str(TESTS / "benchmarks"))
"""Runs a benchmark, whose name and options follow."""
IMPORT_PATHS: Final = (REPOSITORY, TESTS, TESTS / "support", REPOSITORY / "examples")
"""Folders of the modules that these scripts import."""
