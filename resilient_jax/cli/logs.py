"""`resilient-jax logs`: what the workers of a job print."""

from collections.abc import Mapping
from typing import Annotated

import typer

from resilient_jax.cli.job_contact import JobOption, RunDirectoryArgument, StoreOption, choose_job
from resilient_jax.cli.log_printer import print_logs
from resilient_jax.cli.log_sources import LogQuery, make_log_source
from resilient_jax.cli.options import StoreTlsOption, TlsOption
from resilient_jax.cluster.agent_messages import MAX_LINES
from resilient_jax.cluster.run_directory import HostLog
from resilient_jax.telemetry.log_reader import LogPart

HostsOption = Annotated[
    list[str] | None, typer.Option("--host", help="Print only what is of this host; repeat for several.")
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what is appended, until the job ends or Ctrl-C.")
]


def logs(
    run_dir: RunDirectoryArgument = None,
    store: StoreOption = None,
    job: JobOption = None,
    hosts: HostsOption = None,
    lines: Annotated[
        int,
        typer.Option(
            "--lines", "-n", min=0, max=MAX_LINES, help="How many of the last lines of each host to print."
        ),
    ] = 20,
    follow: FollowOption = False,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
) -> None:
    """Print the end of what the workers of each host printed: every line, also of XLA and gloo.

    A job of agents on other machines is found by --store and --job, with their token in RESILIENT_JAX_TOKEN: the agent
    of each host reads its log. A host that does not answer is named on standard error.

    Example: resilient-jax logs runs/first --host host-1

    Example: resilient-jax logs --store etcd://a:2379,b:2379,c:2379 --job lm --host node-7 -f
    """
    source = make_log_source(choose_job(run_dir, store, job, tls, store_tls))
    query = LogQuery(log=HostLog.OUTPUT, hosts=tuple(hosts or ()), lines=lines, follow=follow)
    print_logs(source, query, format_output)


def format_output(parts: Mapping[str, LogPart]) -> bytes:
    """Return the lines of each host, one host after the other, with the host's name before each line."""
    return b"".join(
        f"[{host}] ".encode() + line + b"\n"
        for host, part in parts.items()
        for line in part.data.removesuffix(b"\n").split(b"\n")
        if part.data
    )
