"""How a job ended, in words: complete in the last lines of `launch`, one line for each agent."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.cluster.traceback_text import HEADING, shorten_traceback
from resilient_jax.errors import ExitCode
from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind

MAX_HOSTS_SHOWN = 8
"""How many hosts are named that have the same error."""


def describe_for_launch(outcome: JobOutcome, directory: Path, errors: Mapping[HostName, str]) -> str:
    """Return how the job ended, with the error of a script that failed as its last lines.

    Args:
        directory: folder of logs and events.
        errors: what the scripts of the hosts failed with, as these report it.
    """
    if outcome.kind is JobOutcomeKind.DONE:
        return f"{describe_outcome(outcome)}; logs and events: {directory}"
    logs = f"logs and events: {directory}"
    error = errors.get(outcome.host) if outcome.host is not None else None
    if outcome.kind is not JobOutcomeKind.USER_ERROR or error is None:
        return f"{logs}\n{describe_outcome(outcome)}"
    words = [] if outcome.message.strip() == error.strip() else [outcome.message]
    shown = shorten_traceback(error.strip())
    by_text: dict[str, list[HostName]] = {}
    for host, text in sorted(errors.items()):
        by_text.setdefault(shorten_traceback(text.strip()), []).append(host)
    hosts = by_text.pop(shown)
    if shown != error.strip():
        logs += f" ({outcome.host}.log has the complete traceback)"
    others = [
        f"another error on {_join_hosts(names)}: {extract_exception_line(text)} (complete in {names[0]}.log)"
        for text, names in by_text.items()
    ]
    heading = f"the job ended: {outcome.kind} on {_join_hosts(hosts)}"
    return "\n".join([logs, *others, heading, *words, shown])


def describe_outcome(outcome: JobOutcome) -> str:
    """Return how the job ended, with the traceback of a script that failed."""
    if outcome.kind is JobOutcomeKind.DONE:
        return "done"
    if outcome.kind is JobOutcomeKind.INTERRUPTED:  # as its user ordered: no failure
        return outcome.message
    return f"the job ended: {_describe_kind(outcome)}\n{shorten_traceback(outcome.message)}"


def describe_for_agent(outcome: JobOutcome) -> str:
    """Return why the job ended, of a traceback only the exception: the host that failed has printed the rest."""
    message = extract_exception_line(outcome.message.strip())
    if outcome.kind is JobOutcomeKind.INTERRUPTED:
        return f"the job ended: {message}"
    if outcome.exit_code == ExitCode.RESTART_BUDGET_EXHAUSTED:
        return f"this host ends: {message}"  # the other hosts may continue
    return f"the job ended: {_describe_kind(outcome)}: {message}"


def extract_exception_line(message: str) -> str:
    """Return the first line of the exception of a traceback, without its frames and notes; any other message as it is.

    JAX adds notes to exceptions, so the last line of a traceback says nothing about the error.
    """
    # In the traceback of a group each line has a margin; that of the exceptions in the group is wider.
    lines = [re.sub(r"^  (\| |(?=\+))", "", line) for line in message.splitlines()]
    # The message of an error in a callback of JAX's ends with such a heading, too: what was raised there follows.
    headings = [
        index for index, line in enumerate(lines) if line.endswith(HEADING) and not line.startswith(" ")
    ]
    if not headings or headings[0] != 0:
        return message
    after = itertools.dropwhile(lambda line: line.startswith(" "), lines[headings[-1] + 1 :])
    return next(after, lines[-1])


def _join_hosts(hosts: Sequence[HostName]) -> str:
    """Return the hosts as a text that stays short: a job may have hundreds."""
    shown = ", ".join(hosts[:MAX_HOSTS_SHOWN])
    return shown if len(hosts) <= MAX_HOSTS_SHOWN else f"{shown} and {len(hosts) - MAX_HOSTS_SHOWN} others"


def _describe_kind(outcome: JobOutcome) -> str:
    return f"{outcome.kind} on {outcome.host}" if outcome.host else str(outcome.kind)
