"""The longest files first."""

import pytest
from long_files import put_first

LONGEST_FIRST = (
    "planned_job",
    "trainer_sharded",
    "trainer_job",
    "benchmark_resilience",
    "trainer_orbax",
    "benchmark_stall",
    "flat_state_job",
    "pipeline",
    "jax_runtime",
    "snapshot_training",
    "standby_worker",
    "snapshot_server",
    "program_analysis",
)
"""Files in the order of what they take; the others follow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_first(items, LONGEST_FIRST)
