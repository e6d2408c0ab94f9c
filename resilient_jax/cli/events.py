"""`resilient-jax events`: what has happened to the hosts of a job, in order of time."""

import datetime
import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from resilient_jax.cli.job_contact import JobOption, RunDirectoryArgument, StoreOption, choose_job
from resilient_jax.cli.log_printer import print_logs
from resilient_jax.cli.log_sources import LogQuery, make_log_source
from resilient_jax.cli.logs import FollowOption, HostsOption
from resilient_jax.cli.options import StoreTlsOption, TlsOption
from resilient_jax.cluster.agent_messages import MAX_LINES
from resilient_jax.cluster.run_directory import HostLog
from resilient_jax.errors import MessageError
from resilient_jax.events import Event
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.telemetry.log_reader import LogPart

MAX_VALUE_LENGTH = 200
"""Of a detail in a line for people: longer ones, such as tracebacks, are shortened."""
_DECODER = msgspec.json.Decoder(Event)


def events(
    run_dir: RunDirectoryArgument = None,
    store: StoreOption = None,
    job: JobOption = None,
    hosts: HostsOption = None,
    lines: Annotated[
        int,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            max=MAX_LINES,
            help="How many of the newest events of all hosts together to print.",
        ),
    ] = 50,
    follow: FollowOption = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print each event as a line of JSON, with complete details.")
    ] = False,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
) -> None:
    """Print the newest events of all hosts in order of time (UTC, as well as the hosts' clocks agree).

    A job of agents on other machines is found by --store and --job, with their token in RESILIENT_JAX_TOKEN: the agent
    of each host reads its log. A host that does not answer is named on standard error.

    Example: resilient-jax events runs/first

    Example: resilient-jax events --store etcd://a:2379,b:2379,c:2379 --job lm -f
    """
    source = make_log_source(choose_job(run_dir, store, job, tls, store_tls))
    query = LogQuery(log=HostLog.EVENTS, hosts=tuple(hosts or ()), lines=lines, follow=follow)
    left: int | None = lines  # in the first round each host gives so many

    def format_newest(parts: Mapping[str, LogPart]) -> bytes:
        nonlocal left
        merged = merge_events(parts)
        newest, left = merged if left is None else merged[max(0, len(merged) - left) :], None
        return b"".join(
            (line if json_output else format_event(event).encode(errors="replace")) + b"\n"
            for event, line in newest
        )

    print_logs(source, query, format_newest)


def merge_events(parts: Mapping[str, LogPart]) -> list[tuple[Event, bytes]]:
    """Return the events of all hosts in order of their wall time, each with its line; damaged lines are named."""
    found: list[tuple[Event, bytes]] = []
    for host, part in parts.items():
        for line in part.data.splitlines():
            try:
                found.append((decode_message(_DECODER, line, f"a line of the event log of {host}"), line))
            except MessageError as error:
                sys.stderr.write(f"resilient-jax: {error}\n")
    return sorted(found, key=lambda item: item[0].wall_s)


def format_event(event: Event) -> str:
    """Return a line such as "2026-11-25T17:05:34.123Z host-1 worker.exited generation=3 exit_code=-9"."""
    when = datetime.datetime.fromtimestamp(event.wall_s, datetime.UTC).isoformat(timespec="milliseconds")
    facts = {"generation": event.generation, "step": event.step}
    words = [f"{name}={value}" for name, value in facts.items() if value is not None]
    words += [f"{name}={_format_value(value)}" for name, value in event.detail.items()]
    return " ".join([when.replace("+00:00", "Z"), event.host, event.kind, *words])


def _format_value(value: str | int | float | bool) -> str:
    """Return a detail as one word, or as one string in quotes."""
    if not isinstance(value, str):
        return str(value)
    if len(value) > MAX_VALUE_LENGTH:
        value = f"{value[:MAX_VALUE_LENGTH]}... ({len(value)} characters)"
    return value if value.isprintable() and value and " " not in value else repr(value)
