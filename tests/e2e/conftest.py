"""What all jobs of a session share: a compilation cache, and the undisturbed runs that they are compared with.

The longest files come first.
"""

import os
from collections.abc import Iterator

import pytest
import reference_runs
from long_files import put_first


@pytest.fixture(scope="session", autouse=True)
def shared_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the session's folder, which contains those of the pytest workers
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compile-cache"))
        patch.setenv(reference_runs.FOLDER, str(folder / "reference-runs"))
        yield


LONGEST_FIRST = (
    "chaos_e2e",
    "step_e2e",
    "pipelined_e2e",
    "pipelined_fewer_devices_e2e",
    "kill_matrix",
    "slow_hosts_e2e",
    "snapshots_e2e",
    "kept_stages_e2e",
    "pipelined_devices_e2e",
    "hosts_that_differ",
    "cleanup",
    "pipelined_links_e2e",
    "membership_e2e",
    "seat_standby_e2e",
    "checkpoint_tier_e2e",
    "fuzz_e2e",
    "etcd_e2e",
    "replace_e2e",
    "standby_e2e",
    "rejoin_e2e",
    "pipelined_own_loop_e2e",
    "spare_hosts_e2e",
    "sums_e2e",
)
"""Files in the order of what they take; the others follow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_first(items, LONGEST_FIRST)
