"""`python tests/fuzz RUN_DIR`: attack a job that runs on this machine, without an end unless `--messages` says one."""

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parents[2]))

import typer

from resilient_jax.cli.job_contact import read_live_contact
from resilient_jax.cluster.job_report import read_job_report
from tests.fuzz.attack import attack

BATCH = 10_000


def main(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of the job.")],
    messages: Annotated[int, typer.Option(help="How many to send; 0: until Ctrl-C.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the first batch; each batch has the next.")] = 0,
) -> None:
    """Send a running job messages that no peer of ours sends; exit with 1 if one gets another answer than a refusal."""
    contact = read_live_contact(run_dir)
    is_bad = False
    for batch in itertools.count():
        if messages and batch * BATCH >= messages:
            break
        report = asyncio.run(read_job_report(contact))
        size = min(BATCH, messages - batch * BATCH) if messages else BATCH
        found = asyncio.run(attack(report, contact.store, contact.token, size, seed + batch))
        step = max((host.progress.step for host in report.hosts), default=0)
        print(f"seed {seed + batch}: {found.sent.total()} messages, the job is at step {step}", flush=True)
        for text in found.bad:
            print(f"  {text}", flush=True)
        is_bad |= bool(found.bad)
    raise typer.Exit(int(is_bad))


if __name__ == "__main__":
    typer.run(main)
