"""Paths of the files of the source tree that the benchmarks run."""

import sys
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
TESTS: Final = REPOSITORY / "tests"
JOBS: Final = TESTS / "benchmarks" / "jobs"
"""Scripts that the benchmarks run in processes of their own."""
COMMAND: Final = (sys.executable, str(TESTS / "benchmarks"))
"""Command that runs a benchmark, followed by its name and options."""
IMPORT_PATHS: Final = (REPOSITORY, REPOSITORY / "examples")
"""Folders of the modules that these scripts import."""
