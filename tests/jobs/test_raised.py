"""One host's script raises, or ends by itself: its worker is started again, and all bits are as if it had not."""

import time
from collections.abc import Iterator

import pytest

from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import (
    ExitAction,
    FailPoint,
    FailPointAction,
    FailPointOrder,
    RaiseAction,
)
from tests.support.tiny_job import ONE_DEVICE, TinyJob

HOSTS = 3
AHEAD = 30
"""Steps from now at which the script fails: by then the order is read on all hosts."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield a running job; compare its bits with those of an undisturbed run when all tests are done."""
    with TinyJob(tmp_path_factory.mktemp("raised"), HOSTS, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (RaiseAction(message="no such shard"), "InjectedFault: no such shard"),
        (ExitAction(exit_code=7), "exited with code 7"),
    ],
)
def test_a_host_whose_script_fails_once_trains_again(
    job: TinyJob, action: FailPointAction, said: str
) -> None:
    before = job.wait_training(HOSTS)
    assert before.generation is not None
    since_s = time.monotonic()
    job.job.failpoints.set_order(
        FailPointOrder(
            failpoint=FailPoint.BEFORE_REDUCE,
            step=job.step() + AHEAD,
            hosts=("host-1",),
            action=action,
            name="once",
        )
    )
    after = job.wait_training(HOSTS, before.generation.number)
    job.job.failpoints.release("once")
    assert after.generation is not None
    (raised,) = [one for one in after.generation.failures.raised if one.step > before.generation.state.step][
        -1:
    ]
    assert raised.host == "host-1"
    starts = [
        event.host
        for event in job.job.read_events()
        if event.kind is EventKind.WORKER_STARTED and event.monotonic_s > since_s
    ]
    assert starts == ["host-1"], "another host's worker was started again as well"
    output = job.job.read_output()
    assert any(said in line and line.endswith("starting another") for line in output.splitlines()), output
