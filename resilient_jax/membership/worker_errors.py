"""The errors of scripts, as the statuses of their hosts show them. Pure."""

from resilient_jax.errors import ExitCode
from resilient_jax.health.error_texts import Blame, ErrorSummary, summarize_error
from resilient_jax.ids import HostName, Incarnation
from resilient_jax.protocol.generation import Generation, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus, WorkerStatus
from resilient_jax.protocol.raised_error import EXIT_CODE, RaisedError
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from resilient_jax.protocol.worker_report import WorkerFailureKind

_OF_THE_SCRIPT = (WorkerFailureKind.USER, WorkerFailureKind.LATE)


def find_error(generation: Generation, status: HostStatus) -> JobOutcome | None:
    """Return an error of a script's that the leader has not noted yet, as the outcome that it may be for the job."""
    outcome, worker = find_user_error_on(status), status.worker
    if outcome is None or worker is None:
        return None
    if is_noted(generation, status.host, worker.incarnation):
        return None
    if not _is_late(worker):
        return outcome
    # Whatever an interrupted call raises says nothing about its host, but two equal errors are no chance.
    if summarize_worker_error(worker).blame is not Blame.UNKNOWN:
        return None
    error = read_error(status)
    is_known = any(one.host != error.host and one.is_same_error(error) for one in generation.failures.raised)
    return outcome if is_known else None


def is_noted(generation: Generation, host: HostName, incarnation: Incarnation) -> bool:
    """Return whether the leader has noted the error of a worker, so that its host may start another."""
    return any((one.host, one.incarnation) == (host, incarnation) for one in generation.failures.raised)


def read_error(status: HostStatus) -> RaisedError:
    """Return the record of the error with which a host's worker ended, or is about to end."""
    worker = status.worker
    assert worker is not None, "a worker has raised it"
    summary = summarize_worker_error(worker)
    return RaisedError(
        host=status.host,
        incarnation=worker.incarnation,
        step=max(worker.report.held.step, status.progress.step),
        what=summary.what or f"{EXIT_CODE}{worker.exit_code}",
        place=summary.place,
    )


def summarize_worker_error(worker: WorkerStatus) -> ErrorSummary:
    """Return in short what a worker has raised."""
    failure = worker.report.failure
    return summarize_error(worker.error or (failure.text if failure is not None else ""))


def _is_late(worker: WorkerStatus) -> bool:
    failure = worker.report.failure
    has_ended_itself = worker.exit_code is not None and worker.exit_code >= 0
    return not has_ended_itself and failure is not None and failure.kind is WorkerFailureKind.LATE


def find_user_error_on(status: HostStatus) -> JobOutcome | None:
    """Return the user's own error from one host's worker; None if there is none."""
    worker = status.worker
    if worker is None:
        return None
    failure, code = worker.report.failure, worker.exit_code
    if code is not None and code > 0 and code != RESTART_EXIT_CODE:
        text = worker.error or (failure.text if failure else "")
    elif code == 0 and not worker.report.is_done:
        code, text = (
            int(ExitCode.USAGE),
            "the script ended before rj.run(...) had returned; call rj.run(train) in it",
        )
    elif failure is not None and failure.kind in _OF_THE_SCRIPT and (code is None or code < 0):
        if worker.is_unresponsive:
            return None
        code, text = 1, failure.text
    else:
        return None
    return JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=code, host=status.host, message=text)
