"""Fixtures for the tests of a module whose programs take longer to compile than to run.

XLA does what it always does; LLVM optimizes nothing.
"""

from collections.abc import Iterator

import jax
import pytest

FLAG = "jax_disable_most_optimizations"


@pytest.fixture(scope="module", autouse=True)
def quick_compiling() -> Iterator[None]:
    """Disable LLVM's optimizations in all tests of a module that imports this name."""
    jax.config.update(FLAG, True)
    yield
    jax.config.update(FLAG, False)


@pytest.fixture(scope="module", autouse=True)
def quick_but_in_full(pytestconfig: pytest.Config) -> Iterator[None]:
    """Disable them but in `make test-all`: of promises about bits, which LLVM could break, too."""
    is_quick = not pytestconfig.getoption("--full")
    jax.config.update(FLAG, is_quick)
    yield
    jax.config.update(FLAG, False)
