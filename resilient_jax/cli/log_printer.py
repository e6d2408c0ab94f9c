"""Prints logs of several hosts, once or for as long as the job runs."""

import asyncio
import sys
from collections.abc import Callable, Mapping

import typer

from resilient_jax.cli.console import open_console
from resilient_jax.cli.log_sources import LogQuery, LogRound, LogSource
from resilient_jax.errors import ExitCode, OperatorError
from resilient_jax.telemetry.log_reader import MAX_PART_BYTES, LogPart

POLL_INTERVAL_S = 0.5
MAX_NAMED = 3
"""Hosts that an error names; the others are counted."""

FormatParts = Callable[[Mapping[str, LogPart]], bytes]
"""Returns the text of the parts of one round, by host."""


def print_logs(source: LogSource, query: LogQuery, format_parts: FormatParts) -> None:
    """Print what a query asks for; end with exit code 130 at Ctrl-C.

    Raises:
        CallerError: there is no such log, or no such host.
        OperatorError: no host answered, or standard output cannot be written.
        StoreUnreachable: the store does not answer, or not any more.
    """
    try:
        asyncio.run(_print_rounds(source, query, format_parts))
    except KeyboardInterrupt:
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None


async def _print_rounds(source: LogSource, query: LogQuery, format_parts: FormatParts) -> None:
    offsets: dict[str, int] = {}
    said: Mapping[str, str] = {}
    while True:
        found = await source.read(query, offsets)
        with open_console():
            sys.stdout.buffer.write(format_parts(found.parts))
        for text in list_notes(found, said, is_first=not offsets):
            sys.stderr.write(f"resilient-jax: {text}\n")
        said = found.silent
        offsets |= {host: part.next_offset for host, part in found.parts.items()}
        is_behind = any(len(part.data) > MAX_PART_BYTES // 2 for part in found.parts.values())
        if not query.follow or (found.is_over and not is_behind):
            return
        if not is_behind:
            await asyncio.sleep(POLL_INTERVAL_S)


def list_notes(found: LogRound, said: Mapping[str, str], *, is_first: bool) -> list[str]:
    """Return what is to be said about a round beside its lines.

    Args:
        found: what the round has read.
        said: by host, what the round before said of its silent hosts, which is not repeated.
        is_first: whether there was no round before.

    Raises:
        OperatorError: no host answered in the first round.
    """
    new = [text for host, text in found.silent.items() if host not in said]
    if is_first and not found.parts and new:
        others = f"; and {len(new) - MAX_NAMED} more hosts did not" if len(new) > MAX_NAMED else ""
        raise OperatorError("; ".join(new[:MAX_NAMED]) + others)
    new += [f"host {host} answers again" for host in said if host in found.parts]
    cut = [host for host, part in found.parts.items() if part.is_cut]
    return new + [f"host {host}: only the last {MAX_PART_BYTES // 1024} KiB of its log" for host in cut]
