"""One compilation cache for all tests of a run, since many of them compile the same small programs.

In the environment, and before a test imports JAX: JAX reads it then. The processes of xdist inherit it.
"""

import os
import shutil
import tempfile

import pytest

SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
FOLDER = "JAX_COMPILATION_CACHE_DIR"
MADE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER not in os.environ:
        config.stash[MADE] = os.environ[FOLDER] = tempfile.mkdtemp(prefix="unit-tests-")
        os.environ.update(SETTINGS)


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(MADE, None):
        shutil.rmtree(folder, ignore_errors=True)
