"""Runs the tiny job on CPU on a host whose agent takes it for one with GPUs (`--platform gpu`).

It makes as many devices as GPUs are visible to it, if that is set.

Usage: as of tiny.py.
"""

import os
import runpy
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported; the agent has its own
if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(visible.split(','))}"
runpy.run_path(str(Path(__file__).with_name("tiny.py")), run_name="__main__")
