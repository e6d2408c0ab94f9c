"""Measure: `python tests/benchmarks NAME --help`. Each benchmark prints tables, and one line of JSON last."""

import sys
from pathlib import Path

# Python puts this folder first, where `import snapshot` would find a benchmark; the package is one folder up.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.command_line import main  # noqa: E402 - only now can it be imported

main()
