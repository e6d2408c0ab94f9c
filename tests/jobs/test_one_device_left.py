"""A state that hosts share goes down to one host with one device, and back: nothing is lost, and no bit is another.

For a replicated state, which the last host has anyway, that is in test_membership.py.
"""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.jobs.pod import Pod, loopback_sites, wait_steps
from tests.support import pipelined_job, sharded_job
from tests.support.agents import served_store
from tests.support.kills import generation_of
from tests.support.pipelined_job import PATIENCE_S, check_units
from tests.support.sharded_job import check_shared_steps
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS

HOSTS = 3
LEFT_EXIT_CODE = 84


def check_sharded_steps(work: Path) -> None:
    """Check the bits of each step, and that hosts had less than everything."""
    check_shared_steps(work, devices=1)


def check_pipelined_steps(work: Path) -> None:
    """Check the bits of each step and each unit, and that hosts agree."""
    check_units(work, "\n".join(path.read_text() for path in work.glob("*.out")))


@pytest.mark.parametrize(
    ("script", "words", "check"),
    [
        # A sharded state does so in test_flat_state_job.py, by kills.
        pytest.param(sharded_job.SCRIPT, (), check_sharded_steps, id="sharded", marks=pytest.mark.full),
        pytest.param(pipelined_job.SCRIPT, ("2",), check_pipelined_steps, id="pipelined"),
    ],
)
def test_a_state_fits_on_the_last_device_and_is_shared_again(
    script: Path, words: Sequence[str], check: Callable[[Path], None], tmp_path: Path
) -> None:
    config = f"{CONFIG_WITHOUT_STANDBYS}snapshot_parity = 1\n"
    with (
        served_store() as store,
        Pod(
            tmp_path,
            store,
            loopback_sites(HOSTS),
            script=script,
            words=words,
            config=config,
            patience_s=PATIENCE_S,
        ) as pod,
    ):
        report = pod.wait_training(HOSTS)
        left = [host for host in pod.agents if host != report.leader]
        for remaining, host in zip((2, 1), left, strict=True):
            before = generation_of(report).number
            pod.agents[host].process.send_signal(signal.SIGTERM)
            assert pod.agents[host].wait() == LEFT_EXIT_CODE, pod.output()
            report = pod.wait_training(remaining, before)
        wait_steps(pod, 3)
        for host in left:
            pod.start(host)
        pod.wait_training(HOSTS, generation_of(report).number)
        wait_steps(pod, 3)
        pod.end()
    check(tmp_path)
