"""The kill matrix: which process fails, at which place, and by which signal.

Each test is a cell of the matrix. The cells of a signal are incidents of one running job of four hosts, one after the
other; all hosts are back before the next incident. At the end of a job every step was done once, with the bits of a run
without failures, and no process or file of the job is left.

`make test-jobs` kills each victim at one place, the places in turn, and stops each at the same one: a stopped process
differs from a dead one only until it is noticed. `make test-all` does all of both.
"""

import signal
from collections.abc import Callable, Iterator

import pytest

from resilient_jax.cluster.job_report import JobReport
from tests.support.full_only import full_but
from tests.support.kills import PLACES, TARGETS, Victims, break_and_recover
from tests.support.tiny_job import CONFIG, CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob

HOSTS = 4
CONFIGS = {signal.SIGKILL: CONFIG, signal.SIGSTOP: CONFIG_WITHOUT_STANDBYS}
"""Dead hosts have zygotes. Each has one device: with two, `test_step.py` kills at each place of a step."""
Choice = Callable[[JobReport], Victims]
STOPPED = ("another_worker", "leaders_agent", "coordination_service")
CELLS = [(place, choose) for place in PLACES for choose in TARGETS]


def is_killed_in_make_test_jobs(cell: tuple[str, Choice]) -> bool:
    """Each victim at one place, the places in turn."""
    place, choose = cell
    return PLACES[TARGETS.index(choose) % len(PLACES)] == place


def is_stopped_in_make_test_jobs(cell: tuple[str, Choice]) -> bool:
    """A victim of each kind of process while the others are in a collective: they differ in how it is noticed."""
    place, choose = cell
    return place == PLACES[0] and choose.__name__ in STOPPED


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the running job of a signal; check its invariants when all its cells are done, before the next begins."""
    number: signal.Signals = request.param
    work = tmp_path_factory.mktemp(number.name)
    with TinyJob(work, HOSTS, CONFIGS[number], options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


@pytest.mark.parametrize("job", [signal.SIGKILL], indirect=True)
@pytest.mark.parametrize(("place", "choose"), full_but(CELLS, is_killed_in_make_test_jobs))
def test_training_survives_a_kill(place: str, choose: Choice, job: TinyJob) -> None:
    break_and_recover(job, choose, place, signal.SIGKILL)


@pytest.mark.parametrize("job", [signal.SIGSTOP], indirect=True)
@pytest.mark.parametrize(("place", "choose"), full_but(CELLS, is_stopped_in_make_test_jobs))
def test_training_survives_a_stopped_process(place: str, choose: Choice, job: TinyJob) -> None:
    break_and_recover(job, choose, place, signal.SIGSTOP)
