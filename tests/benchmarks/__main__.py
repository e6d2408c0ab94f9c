"""Entry point of `python tests/benchmarks NAME [OPTIONS]`; see `command_line`."""

import sys
from pathlib import Path

# Python puts the script's folder first, so that `import snapshot` would find a benchmark; replace it by the parent.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.command_line import main  # noqa: E402 - only now can it be imported

main()
