"""`resilient-jax replay`: compute a step of a job again on this machine, and compare it with what was committed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from resilient_jax.cli.console import open_console
from resilient_jax.cli.replay_comparison import (
    ComparedDigest,
    compare_digests,
    describe_other_script,
    find_last_step,
    read_recorded_run,
)
from resilient_jax.cluster.run_directory import HostLog, find_logs
from resilient_jax.errors import CallerError, StateError
from resilient_jax.jax_runtime.worker_environment import Platform, make_worker_environment
from resilient_jax.protocol.replay import REPLAY_VARIABLE, ReplayOrder, encode_order
from resilient_jax.protocol.step_digests import (
    DigestEntry,
    ReplayBegun,
    ReplayRefused,
    RunEntry,
    read_digest_logs,
)

EXIT_CODE_DIFFERS = 1
MAX_ERROR_LINES = 20
"""Of what a script printed last, if it fails."""
PLATFORMS: dict[str, Platform] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}
NOTHING = "-"


def replay(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="Run folder of the job, with the digests of its steps.",
            show_default=False,
        ),
    ],
    step: Annotated[int, typer.Option("--step", min=0, help="The step to compute again, counted from 0.")],
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start", help="Compute all steps from the first one if no checkpoint is old enough."
        ),
    ] = False,
    any_script: Annotated[
        bool, typer.Option("--any-script", help="Go on although the script or a version has changed.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compute a step again on this machine, and compare its digests with what the job committed.

    The job's script runs here alone, with as many devices as a host of the job had: from the newest checkpoint of at
    most STEP steps, through STEP, up to the next step of which the job recorded digests (every
    `digest_interval_steps`). With exact sums every digest must be equal, whichever and however many hosts computed the
    step. It writes no checkpoint, no log and calls no callback, and ends before the script goes on after training.

    A digest of the sum that differs: a gradient was computed wrongly, or data or code have changed since. Equal sums
    and another state: the update. All equal: so are all steps since the checkpoint.

    Exit codes: 0 all equal, 1 something differs, 2 the step cannot be computed again; the error says why.

    Example: resilient-jax replay runs/first --step 118
    """
    recorded = read_recorded_run(run_dir, find_logs(run_dir, HostLog.DIGESTS), step)
    order = ReplayOrder(
        step=step, last_step=find_last_step(recorded, run_dir, step), output="", from_start=from_start
    )
    computed = compute_again(recorded.run, order, any_script=any_script)
    begun = [entry.step for entry in computed if isinstance(entry, ReplayBegun)]
    rows = compare_digests(recorded, computed)
    differ = any(row.is_equal is False for row in rows)
    if json_output:
        found = {"first_step": begun[0], "step": step, "equal": not differ, "digests": rows}
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        with open_console() as console:
            console.print(
                f"computed from the state after {begun[0]} steps: {escape(' '.join(recorded.run.command))}"
            )
            console.print(tabulate(rows, step))
            console.print(_summarize(rows, step, order.last_step), highlight=False)
    raise typer.Exit(EXIT_CODE_DIFFERS if differ else 0)


def compute_again(run: RunEntry, order: ReplayOrder, *, any_script: bool) -> list[DigestEntry]:
    """Return what the script writes when it computes the steps of an order again, on this machine.

    Raises:
        CallerError: the script cannot be run, fails, or is another one.
    """
    if not Path(run.command[0]).is_file():
        raise CallerError(
            f"{run.command[0]}: found no such file, expected the script of the job. Replay where it was trained, or "
            "put the script back"
        )
    if not Path(run.working_directory).is_dir():
        raise CallerError(
            f"{run.working_directory}: found no such folder, expected the one in which the job ran. Create it"
        )
    with tempfile.TemporaryDirectory(prefix="resilient-jax-replay-") as folder:
        output, printed = Path(folder) / "digests.jsonl", Path(folder) / "output"
        order = msgspec.structs.replace(order, output=str(output))
        with printed.open("wb") as file:
            done = subprocess.run(
                [sys.executable, *run.command],
                cwd=run.working_directory,
                env=make_replay_environment(run, order),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        found = read_digest_logs([output]) if output.exists() else []
        last_lines = "\n".join(printed.read_text(errors="replace").splitlines()[-MAX_ERROR_LINES:])
    refusals = [entry.why for entry in found if isinstance(entry, ReplayRefused)]
    others = [describe_other_script(run, entry) for entry in found if isinstance(entry, RunEntry)]
    if others and others[0] and not any_script:
        raise StateError(
            f"replay of step {order.step}: found another script than the job ran: {others[0]}; expected the same. "
            "Restore it, or go on with --any-script"
        )
    if refusals:
        raise StateError(refusals[0])
    if done.returncode or not any(isinstance(entry, ReplayBegun) for entry in found):
        raise CallerError(
            f"replay of step {order.step}: the script ended with code {done.returncode} before the step was done, "
            f"expected it to train as in the job. Its last lines:\n{last_lines}"
        )
    return found


def make_replay_environment(run: RunEntry, order: ReplayOrder) -> dict[str, str]:
    """Return the environment in which a script computes steps again: with as many devices as a host of its job."""
    return {
        **os.environ,
        **make_worker_environment(
            platform=PLATFORMS.get(run.platform),
            devices_per_host=run.num_devices,
            cache_dir=None,
            collective_timeout_s=300.0,
            base=os.environ,
        ),
        REPLAY_VARIABLE: encode_order(order),
    }


def tabulate(rows: Sequence[ComparedDigest], step: int) -> Table:
    """Return a table of what was compared; of what was only computed, `step` has rows and the rest is counted."""
    table = Table("step", "of", "committed", "computed", "")
    shown = [row for row in rows if row.is_equal is not None or row.step == step]
    for row in shown:
        verdict = {True: "equal", False: "[bold red]DIFFERS[/]", None: "not recorded"}[row.is_equal]
        table.add_row(
            str(row.step), escape(row.what), row.committed or NOTHING, row.computed or NOTHING, verdict
        )
    if left_out := len({row.step for row in rows} - {row.step for row in shown}):
        table.caption = f"{left_out} more steps were computed, of which the job recorded nothing"
    return table


def _summarize(rows: list[ComparedDigest], step: int, last_step: int) -> str:
    if wrong := [row for row in rows if row.is_equal is False]:
        first = f"first in the {wrong[0].what} of step {wrong[0].step}"
        return f"what was committed differs from what is computed here, {first}"
    if last_step > step:
        return (
            f"all recorded digests are equal. Step {step} itself was not recorded: the state after step {last_step}, "
            "which follows from it, is equal"
        )
    return f"step {step} was computed as committed"
