"""What the end of a worker means for its host and its job. Pure."""

import signal
from collections.abc import Mapping, Sequence

from resilient_jax.cluster.child_process import get_signal_name
from resilient_jax.cluster.traceback_text import is_start
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.errors import ExitCode
from resilient_jax.health.error_texts import summarize_error
from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from resilient_jax.protocol.worker_report import WorkerFailureKind

SIGNAL_EXIT_CODE_BASE = 128
"""What shells add to a signal's number for the exit code of a process that it ended."""


def is_users_error(code: int) -> bool:
    """Return whether the script ended by itself without asking for a restart; a signal is not the script's doing."""
    return code >= 0 and code != RESTART_EXIT_CODE


def find_error(worker: WorkerProcess) -> str:
    """Return the error text of a script that failed, for the user; empty if it did not fail, or was killed."""
    code = worker.child.exit_code
    if code is None or code <= 0:
        return ""
    if error := find_reported_error(worker):
        return error  # complete, with its cause, however long
    if not worker.error:
        return f"the script exited with code {code} and wrote nothing to standard error"
    if is_start(worker.error.partition("\n")[0]):
        return worker.error
    return f"the script exited with code {code}; the end of its standard error:\n{worker.error}"


def find_reported_error(worker: WorkerProcess) -> str:
    """Return the error of its user's that the worker has reported, also if it was killed then; empty: none."""
    failure = worker.report.failure
    return failure.text if failure is not None and failure.kind is WorkerFailureKind.USER else ""


def describe_exit(code: int) -> str:
    """Return an exit code in words, as the predicate of a sentence."""
    if code < 0:
        return f"was ended by {get_signal_name(-code)}"
    return f"exited with code {code}"


def describe_end(worker: WorkerProcess, code: int) -> str:
    """Return how a worker ended, with the error of a script that failed, as the predicate of a sentence."""
    error = summarize_error(find_error(worker) or find_reported_error(worker))
    at = f" ({error.place})" if error.place else ""
    return f"{describe_exit(code)}: {error.message}{at}" if error.what else describe_exit(code)


def describe_missing(code: int) -> str:
    """Return what is missing where a signal ended a script after training."""
    return (
        f"training is done, but the script {describe_exit(code)} before its end; what it does after training is "
        "missing on this host"
    )


def find_killed_scripts(codes: Mapping[HostName, int], trained: Sequence[HostName]) -> dict[HostName, int]:
    """Return the hosts whose script a signal ended after training, and the signals, if nothing of the job is missing.

    All hosts have the result of training, and run the same script with it. What is done once, as to save it, the host
    of index 0 does, so that one must have come to its end. A script that ended with an error of its own is none of
    these: another host's success does not excuse it.

    Args:
        trained: the hosts that trained to the end, in order of their indexes.
    """
    if not trained or codes.get(trained[0]) != 0:
        return {}
    signals = {int(number) for number in signal.valid_signals()}
    return {
        host: code - SIGNAL_EXIT_CODE_BASE
        for host, code in sorted(codes.items())
        if code - SIGNAL_EXIT_CODE_BASE in signals and code != ExitCode.INTERRUPTED
    }


def apply_exit_code(
    outcome: JobOutcome, worker: WorkerProcess, host: HostName, earlier_code: int | None
) -> tuple[JobOutcome, str]:
    """Return the outcome with the exit code of a script that failed after training, or was killed then.

    Args:
        worker: last worker of this host.
        earlier_code: exit code of a worker that had trained to the end and was killed then; the code counts even if
            another worker was started since. None: no such worker.

    Returns:
        The outcome of this host, and what to print about the outcome; empty: nothing.
    """
    code = worker.child.exit_code
    if code is None or outcome.kind is not JobOutcomeKind.DONE:
        return outcome, ""
    if code < 0 and worker.has_script_ended:
        return (
            outcome,
            f"Python's shutdown {describe_exit(code)}; the script had come to its end, nothing is missing",
        )
    # This worker did not train to the end: it was ready too late, or its error was one that the others outlived.
    if not worker.report.is_done and code != 0:
        if earlier_code is None:
            return outcome, "training was done without this host; what its script does then is left out"
        code = earlier_code
    if code == 0:
        return outcome, ""
    failed = JobOutcome(
        kind=JobOutcomeKind.USER_ERROR,
        exit_code=code if code > 0 else SIGNAL_EXIT_CODE_BASE - code,
        host=host,
        message=find_error(worker) if code > 0 else describe_missing(code),
    )
    return failed, ""
