"""Where the programs that tests compile are kept."""

import platform
from importlib.metadata import version
from typing import Final

from tests.support.paths import ROOT

CACHE: Final = {
    "JAX_COMPILATION_CACHE_DIR": str(
        ROOT / ".cache" / "tests" / f"jaxlib-{version('jaxlib')}-{platform.machine()}"
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Compiled programs outlive the run. Keys of ours have the processor's features in them, and JAX's have its name.

Environment variables that `conftest.py` sets, and that all processes of tests inherit.
"""
