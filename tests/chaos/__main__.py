"""Entry point of `python tests/chaos [MANIFEST] [OPTIONS] -- SCRIPT`; see `command_line`."""

import sys
from pathlib import Path

# Python puts the script's folder first, so that `import disk` would find a module of the campaigns.
sys.path[0] = str(Path(__file__).parents[2])

from tests.chaos.command_line import main  # noqa: E402 - only now can it be imported

main()
