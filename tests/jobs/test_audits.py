"""A host whose processor computes wrongly is named by audits and taken out, and nothing that it has touched stays.

Of the job's steps 0, 5, 7, 8, ... are audited with a share of 0.25 and three hosts (`draw_audits`).
"""

import re

import pytest

from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint, FailPointOrder, FlipBitAction
from tests.jobs.launched import make_environment, run_alone
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until
from tests.support.patient_job import PatientJob

JOB = SCRIPTS / "trainer_job.py"
DEADLINE_S = patience(24)
CORRUPT = "host-1"
DIGEST = r"step 14 digest \w{64}"


def launch(work, hosts, share, more=""):
    work.mkdir(exist_ok=True)
    (work / "job.toml").write_text(f"audit_share = {share}\nrestart_backoff_s = 0.0\n{more}")
    return PatientJob(
        [str(JOB), str(work)],
        num_hosts=hosts,
        run_directory=work / "run",
        options=["--config", str(work / "job.toml"), "--devices-per-host", "2"],
        environment=make_environment(),
    )


def flip_bits_after(job, work, step, *, is_repeated):
    """Have the host compute wrongly from the next step on, once the checkpoint of step 4 is on storage."""
    job.hold(FailPoint.AFTER_COMMIT, [CORRUPT], step)
    job.wait_held([CORRUPT], DEADLINE_S)
    wait_until("the checkpoint of step 4", lambda: (work / "checkpoints" / "4").exists(), DEADLINE_S)
    order = FailPointOrder(
        failpoint=FailPoint.AFTER_MICROBATCH,
        step=-1 if is_repeated else step + 1,
        hosts=(CORRUPT,),
        action=FlipBitAction(is_repeated=is_repeated),
        name="flip",
    )
    job.failpoints.set_order(order)
    job.release()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the digest of a run on one machine, without audits."""
    return run_alone([str(JOB), str(tmp_path_factory.mktemp("alone"))], DEADLINE_S).strip()


@pytest.mark.parametrize("abort", ["interrupt", pytest.param("replace", marks=pytest.mark.full)])
def test_a_host_that_computes_wrongly_is_taken_out_and_the_job_goes_back_to_what_it_has_not_touched(
    undisturbed, tmp_path, abort
):
    with launch(tmp_path, 3, 0.25, f'abort = "{abort}"\n') as job:
        flip_bits_after(job, tmp_path, 5, is_repeated=True)
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, output = job.read_events(), job.read_output()
    failed = [event for event in events if event.kind is EventKind.AUDIT_FAILED]
    assert {(event.detail["step"], event.detail["corrupt"]) for event in failed} == {(7, CORRUPT)}
    out = [event.detail for event in events if event.kind is EventKind.HOST_QUARANTINED]
    assert [detail["quarantined"] for detail in out] == [CORRUPT]
    assert "host-1 computes wrongly: audits of step 7 found another result" in str(out[0]["reason"])
    # With "replace" its agent may end its worker before that has learned that it is the one.
    corrupt = [event for event in events if event.kind is EventKind.HOST_CORRUPT]
    assert [event.host for event in corrupt] == [CORRUPT] or abort == "replace"
    assert all("States of more than 6 steps are in doubt" in str(event.detail["why"]) for event in corrupt)
    restoring = (EventKind.CHECKPOINT_RESTORED, EventKind.SNAPSHOT_RESTORED)
    resumed = [int(event.detail["step"]) for event in events if event.kind in restoring]
    assert 0 < max(resumed) <= 6, "from before what it may have touched"
    assert set(re.findall(DIGEST, output)) == {undisturbed}


@pytest.mark.full  # the other end of an audit is below
def test_if_all_was_verified_the_others_finish_the_step_without_the_host(undisturbed, tmp_path):
    with launch(tmp_path, 3, 1.0) as job:
        flip_bits_after(job, tmp_path, 5, is_repeated=False)
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, output = job.read_events(), job.read_output()
    failed = [event for event in events if event.kind is EventKind.AUDIT_FAILED]
    assert {(event.detail["step"], event.detail["corrupt"]) for event in failed} == {(6, CORRUPT)}
    assert {event.detail["why"] for event in failed} == {"its result changed on recomputation"}
    assert not [event for event in events if event.kind is EventKind.STATE_LOST]
    assert set(re.findall(DIGEST, output)) == {undisturbed}
