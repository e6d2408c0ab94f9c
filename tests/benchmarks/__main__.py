"""Entry point of `python tests/benchmarks NAME [OPTIONS]`; see `command_line`."""

import sys
from pathlib import Path

# Python puts the script's folder first, so that `import snapshot` would find a benchmark.
sys.path[0] = str(Path(__file__).parents[2])

from tests.benchmarks.command_line import main  # noqa: E402 - only now can it be imported

main()
