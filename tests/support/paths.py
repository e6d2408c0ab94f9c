"""Where things are, wherever a test is."""

from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
SUPPORT: Final = TESTS / "support"
SCRIPTS: Final = SUPPORT / "scripts"
"""The scripts of jobs."""
ROOT: Final = TESTS.parent
CONFIGS: Final = ROOT / "configs"
EXAMPLES: Final = ROOT / "examples"
MESHES: Final = ROOT / "meshes"
