"""One compilation cache for all tests of a run, since many compile the same small programs; the longest files first.

The cache is in the environment, and before a test imports JAX: JAX reads it then. The processes of xdist inherit it.
"""

import os
import shutil
import tempfile

import pytest

from tests.support.long_files import put_first

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


LONGEST_FIRST = (
    "planned_pipelines",
    "membership_properties",
    "plan_memory",
    "pipelined_devices",
    "pipelined_trainer",
    "pipelined_variables",
    "plan_programs",
    "planning_search",
    "trainer_programs",
    "trainer_fit",
    "trainer_variables",
    "trainer_examples",
    "trainer_models",
    "trainer_sharded",
)
"""Files in the order of what they take; the others follow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_first(items, LONGEST_FIRST)
