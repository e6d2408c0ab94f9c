"""Programs of small models take longer to compile than to run: most of what tests with JAX would take.

Fusions are compiled by XLA's older emitters, where it has them, and LLVM optimizes nothing: about half the processor
time. What XLA does with a program before that is as ever. `make test-all`, jobs and smoke compile as users do.
"""

import os
import sys
from importlib.metadata import version

import pytest

# A flag that XLA does not know ends the process: that of jaxlib 0.12 has no older emitters.
HAS_OLDER_EMITTERS = version("jaxlib").startswith("0.10.")
XLA_FLAG = "--xla_cpu_use_fusion_emitters=false"
JAX_FLAG = "jax_disable_most_optimizations"


def compile_quickly(config: pytest.Config) -> None:
    """Compile quickly in this process and in those that it starts, but in `make test-all`."""
    if config.getoption("--full"):
        return
    if HAS_OLDER_EMITTERS:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAG}".strip()
    os.environ[JAX_FLAG.upper()] = "1"
    if (jax := sys.modules.get("jax")) is not None:  # it has read the environment
        jax.config.update(JAX_FLAG, True)
