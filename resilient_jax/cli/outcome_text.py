"""How a job ended, in words: complete in the last lines of `launch`, one line for each agent."""

import itertools
import re
from pathlib import Path

from resilient_jax.errors import ExitCode
from resilient_jax.protocol.records import JobOutcome, JobOutcomeKind

TRACEBACK_HEADING = "Traceback (most recent call last):"
JAX_NOTE = re.compile(r"\n(?:  \| )?-{20}\n(?:  \| )?For simplicity, JAX has removed its internal frames .*")
"""What JAX appends to the message of an exception that leaves one of its functions."""


def describe_for_launch(outcome: JobOutcome, directory: Path) -> str:
    """Return how the job ended, with the complete traceback of a script that failed."""
    logs = f"logs and events: {directory}"
    if outcome.kind is JobOutcomeKind.DONE:
        return f"{describe_outcome(outcome)}; {logs}"
    return f"{logs}\n{describe_outcome(outcome)}"


def describe_outcome(outcome: JobOutcome) -> str:
    """Return how the job ended, with the complete traceback of a script that failed."""
    if outcome.kind is JobOutcomeKind.DONE:
        return "done"
    if outcome.kind is JobOutcomeKind.INTERRUPTED:  # as its user ordered: no failure
        return outcome.message
    return f"the job ended: {_describe_kind(outcome)}\n{JAX_NOTE.sub('', outcome.message)}"


def describe_for_agent(outcome: JobOutcome) -> str:
    """Return why the job ended, of a traceback only the exception: the host that failed has printed the rest."""
    message = find_exception_line(outcome.message.strip())
    if outcome.exit_code == ExitCode.RESTART_BUDGET_EXHAUSTED:
        return f"this host ends: {message}"  # the other hosts may continue
    return f"the job ended: {_describe_kind(outcome)}: {message}"


def find_exception_line(message: str) -> str:
    """Return the first line of the exception of a traceback, without its frames and notes; any other message as it is.

    JAX adds notes to exceptions, so the last line of a traceback says nothing about the error.
    """
    # In the traceback of a group each line has a margin; that of the exceptions in the group is wider.
    lines = [re.sub(r"^  (\| |(?=\+))", "", line) for line in message.splitlines()]
    # The message of an error in a callback of JAX's ends with such a heading, too: what was raised there follows.
    headings = [
        index
        for index, line in enumerate(lines)
        if line.endswith(TRACEBACK_HEADING) and not line.startswith(" ")
    ]
    if not headings or headings[0] != 0:
        return message
    after = itertools.dropwhile(lambda line: line.startswith(" "), lines[headings[-1] + 1 :])
    return next(after, lines[-1])


def _describe_kind(outcome: JobOutcome) -> str:
    return f"{outcome.kind} on {outcome.host}" if outcome.host else str(outcome.kind)
