"""Which worker keeps the others waiting, and what becomes of it."""

import pytest
from membership_job import Job, training

from resilient_jax.protocol.records import GenerationPhase, WorkerState
from resilient_jax.protocol.worker_tasks import OverdueTask, WorkerTask


def overdue(task: WorkerTask, *, step: int = 7, silent_s: float = 6.0) -> OverdueTask:
    place = "`load_batch`, line 40 of train.py"
    return OverdueTask(task=task, step=step, place=place, silent_s=silent_s, deadline_s=5.0)


def report(job: Job, name: str, found: OverdueTask | None) -> None:
    job.report(name, state=WorkerState.RUNNING, overdue=found)


def test_the_host_that_has_not_entered_the_sum_is_named_and_left_out() -> None:
    job = training("a", "b", "c")
    report(job, "a", overdue(WorkerTask.SUM))
    assert job.phase is GenerationPhase.ACTIVE, "it waits, and for whom is not known yet"
    report(job, "b", overdue(WorkerTask.INPUT))
    assert job.phase is GenerationPhase.ACTIVE, "c may evaluate, or hang for the same reason"
    report(job, "c", overdue(WorkerTask.SUM))
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, ["a", "c"])
    place = "its main thread is in `load_batch`, line 40 of train.py (input, for 6 s)"
    assert job.generation.hang == f"b has not entered the sum of step 7: {place}"
    assert job.generation.reason == job.generation.hang
    job.acknowledge("a", "c")
    job.serve()
    assert (job.phase, job.generation.hang != "") == (GenerationPhase.FORM, True)
    job.form()
    job.worker("c", exit_code=-9)
    assert job.generation.hang == "", "the next change has another reason"


@pytest.mark.parametrize("phase", [GenerationPhase.ACTIVE, GenerationPhase.FORM])
def test_a_worker_that_is_late_in_something_else_than_training_is_no_hang(phase: GenerationPhase) -> None:
    job = training("a", "b", "c")
    if phase is GenerationPhase.FORM:
        job.worker("c", exit_code=-9)
        job.acknowledge("a", "b", step=5)
    assert job.phase is phase
    for name in job.members[:2]:
        job.report(
            name, overdue=overdue(WorkerTask.FORMING if phase is GenerationPhase.FORM else WorkerTask.SUM)
        )
    assert job.phase is phase


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_planned_change_after_a_hang_names_it_no_more(is_leaving: bool) -> None:
    job = training("a", "b", "c")
    report(job, "b", overdue(WorkerTask.INPUT))
    for name in "ac":
        report(job, name, overdue(WorkerTask.SUM))
    job.acknowledge("a", "c", overdue=None)
    job.serve()
    job.form()
    assert (job.phase, job.generation.hang != "") == (GenerationPhase.ACTIVE, True)
    for name in "ac":
        job.report(name, state=WorkerState.RUNNING, has_finished_step=True)
    if is_leaving:
        job.change("c", is_draining=True)
    else:
        job.restart("b")
    assert (job.phase, job.generation.hang) == (GenerationPhase.PAUSE, "")


def test_of_many_hosts_that_hang_some_are_described() -> None:
    names = [f"h{number}" for number in range(9)]
    job = training(*names)
    for name in names[:7]:
        report(job, name, overdue(WorkerTask.INPUT))
    for name in names[7:]:
        report(job, name, overdue(WorkerTask.SUM))
    assert job.members == names[7:]
    assert job.generation.hang.count("its main thread is in") == 5
    assert job.generation.hang.endswith("; 2 more hosts, too")


def test_progress_takes_a_report_back() -> None:
    job = training("a", "b", "c")
    report(job, "a", overdue(WorkerTask.SUM))
    report(job, "b", overdue(WorkerTask.SUM))
    report(job, "a", None)
    report(job, "c", overdue(WorkerTask.SUM))
    assert job.phase is GenerationPhase.ACTIVE, "a is not in the sum any more"


def test_a_collective_that_none_leaves_is_tried_again_by_the_same_workers() -> None:
    job = training("a", "b")
    report(job, "a", overdue(WorkerTask.SUM))
    report(job, "b", overdue(WorkerTask.SUM, silent_s=9.0))
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, ["a", "b"])
    assert job.generation.hang == "all 2 hosts have entered the sum of step 7, and none has left it for 6 s"
    assert job.generation.attempts == 1


def test_what_all_hosts_wait_for_may_come_back_and_else_all_are_restarted() -> None:
    job = training("a", "b")
    report(job, "a", overdue(WorkerTask.INPUT))
    report(job, "b", overdue(WorkerTask.INPUT))
    assert job.phase is GenerationPhase.ACTIVE
    report(job, "a", overdue(WorkerTask.INPUT, silent_s=12.0))
    assert job.phase is GenerationPhase.ACTIVE
    report(job, "b", overdue(WorkerTask.INPUT, silent_s=12.0))
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, [])
    assert job.generation.hang.startswith("no host makes progress: a has not entered the sum of step 7")


def test_a_hang_before_a_planned_boundary_does_not_hold_the_change_up() -> None:
    job = training("a", "b")
    for name in "ab":
        job.report(name, state=WorkerState.RUNNING, has_finished_step=True, step=6)
    job.change("b", is_draining=True)
    assert job.phase is GenerationPhase.PAUSE
    for name in "ab":
        job.report(name, generation=job.generation.number, earliest_stop_step=8)
    job.report("a", state=WorkerState.IDLE, step=8)
    assert job.phase is GenerationPhase.BOUNDARY
    report(job, "b", overdue(WorkerTask.COMPUTE))
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, ["a"])


def test_a_host_that_does_not_stop_is_left_out_with_the_place_where_it_is() -> None:
    job = training("a", "b", "c")
    job.worker("c", exit_code=-9)
    report(job, "b", overdue(WorkerTask.USER_CODE, silent_s=1.2))
    job.acknowledge("a")
    job.wait(2 * job.config.quiesce_timeout_s + 0.1)  # they have the last copy of the state
    late = next(g for g in job.published if "did not stop" in g.reason)
    assert late.reason.endswith(
        "; b: its main thread is in `load_batch`, line 40 of train.py (user code, for 1 s)"
    )
