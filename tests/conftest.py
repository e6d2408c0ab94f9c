"""What all tests have in common: their tiers, deadlines, examples, and one compilation cache.

`tests/README.md` says where a test goes, `tests/run.py` runs them.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support import purity, reference_runs
from tests.support.compile_cache import CACHE
from tests.support.durations import order_by_duration
from tests.support.patience import patience
from tests.support.properties import FULL, QUICK, register_profiles
from tests.support.tiers import FULL_ONLY, PURE, find_tier


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("resilient_jax")
    group.addoption(
        "--full", action="store_true", help="also tests marked `full`, and hundreds of new examples"
    )
    group.addoption(
        "--rewrite", action="store_true", help="write what happens into scenarios of the membership"
    )


def pytest_configure(config: pytest.Config) -> None:
    register_profiles()
    settings.load_profile(FULL if config.getoption("--full") else QUICK)
    # Before a test imports JAX, which reads it then; inherited by all processes that tests start.
    for name, value in CACHE.items():
        os.environ.setdefault(name, value)
    # A crash in native code prints the stacks of its threads.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # What `nohup` and a shell's `&` ignore, processes of tests would ignore, too.
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    purity.install()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    with purity.held(find_tier(collector.path) is PURE):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with purity.held(find_tier(item.path) is PURE):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-all` runs; begin with what takes longest."""
    if not config.getoption("--full"):
        kept, left_out = [], []
        for item in items:
            tier = find_tier(item.path)
            is_for_all = item.get_closest_marker("full") is not None or (
                tier is not None and tier.name in FULL_ONLY
            )
            (left_out if is_for_all else kept).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        tier = find_tier(item.path)
        if tier is not None:
            item.add_marker(pytest.mark.timeout(patience(tier.longest_s)))
    order_by_duration(items, is_one_process="PYTEST_XDIST_WORKER" not in os.environ)


@pytest.fixture(scope="session", autouse=True)
def shared_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share undisturbed runs, with which jobs are compared, among all processes of the run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the session's folder, which contains those of the pytest workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(reference_runs.FOLDER, str(folder / "reference-runs"))
        yield
