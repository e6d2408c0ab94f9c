"""Where the campaigns are, and the command that runs them."""

import sys
from pathlib import Path
from typing import Final

CHAOS: Final = Path(__file__).parent
REPOSITORY: Final = CHAOS.parents[1]
CAMPAIGNS: Final = CHAOS / "campaigns"
COMMAND: Final = (sys.executable, str(CHAOS))
"""Runs a campaign, followed by its manifest or options, and the script."""
