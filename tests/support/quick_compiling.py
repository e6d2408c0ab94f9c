"""A fixture for the tests of a module whose programs take longer to compile than to run.

XLA does what it always does; LLVM optimizes nothing.
"""

import jax
import pytest

FLAG = "jax_disable_most_optimizations"


@pytest.fixture(scope="module", autouse=True)
def quick_compiling():
    """Disable LLVM's optimizations in all tests of a module that imports this name."""
    jax.config.update(FLAG, True)
    yield
    jax.config.update(FLAG, False)
