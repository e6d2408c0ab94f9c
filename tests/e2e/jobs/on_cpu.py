"""Runs the tiny job on CPU on a host whose agent takes it for one with GPUs (`--platform gpu`).

Usage: as of tiny.py.
"""

import os
import runpy
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported; the agent has its own
runpy.run_path(str(Path(__file__).with_name("tiny.py")), run_name="__main__")
