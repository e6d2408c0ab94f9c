"""Tests with JAX in one process."""

from typing import Final

import pytest

from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from tests.support.null_cache_hooks import NullCacheHooks
from tests.support.quick_compiling import compile_quickly

CACHE_BYTES: Final = 4 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    compile_quickly(config)


@pytest.fixture(scope="session", autouse=True)
def shared_cache() -> None:
    """Write entries of the compilation cache as workers do: whole. Two tests that run at a time may need the same."""
    assert share_compilation_cache(NullCacheHooks(), CACHE_BYTES) is None
