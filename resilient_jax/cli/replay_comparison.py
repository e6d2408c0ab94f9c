"""What a job recorded of its steps, beside what a replay computed. Pure, but for reading the records."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilient_jax.errors import CallerError, StateError
from resilient_jax.protocol.step_digests import (
    DigestEntry,
    RunEntry,
    StepDigests,
    SumDigest,
    read_digest_logs,
)

MAX_NAMED = 3
"""Differences of a script that an error names."""


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a job recorded in its run folder.

    Attributes:
        run: what its last worker ran.
        steps: the digests of steps, in the order of the steps; more than one of a step that was computed again.
    """

    run: RunEntry
    steps: tuple[StepDigests, ...]


class ComparedDigest(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the comparison.

    Attributes:
        what: name of what was digested, such as "state" or "sum 'train'".
        committed: the digest that the job recorded, "" for none; several if the job itself recorded different ones.
        computed: the digest that the replay computed; "" for none.
        is_equal: None if there is nothing to compare with.
    """

    step: int
    what: str
    committed: str
    computed: str
    is_equal: bool | None


def read_recorded_run(directory: Path, logs: Mapping[str, Path], step: int) -> RecordedRun:
    """Return what the job of a run folder recorded.

    Args:
        directory: the run folder, for the error.
        logs: digest log of each host.
        step: number of the step that is to be computed again, for the error.

    Raises:
        CallerError: nothing was recorded there.
    """
    entries = read_digest_logs(logs.values())
    runs = [entry for entry in entries if isinstance(entry, RunEntry)]
    steps = sorted((e for e in entries if isinstance(e, StepDigests)), key=lambda entry: entry.step)
    if not runs or not steps:
        raise CallerError(
            f"replay of step {step}: found no digests of steps in {directory}, expected a run folder of `launch` or "
            "of an agent whose job has trained for digest_interval_steps (64, unless its configuration has another "
            "number; 0 records none)"
        )
    return RecordedRun(run=max(runs, key=lambda run: run.wall_s), steps=tuple(steps))


def find_last_step(recorded: RecordedRun, directory: Path, step: int) -> int:
    """Return the first recorded step from `step` on: up to it a replay computes.

    Raises:
        CallerError: no such step was recorded.
        StateError: the digests of that step depend on which hosts computed it, or one machine cannot compute it.
    """
    later = [entry for entry in recorded.steps if entry.step >= step]
    if not later:
        raise CallerError(
            f"replay of step {step}: found digests up to step {recorded.steps[-1].step} in {directory}, expected some "
            f"of step {step} or a later one. Give an earlier step"
        )
    if not later[0].sums and not later[0].state:
        raise StateError(
            f"replay of step {step}: found neither a sum over microbatches nor a complete state in the digests of step "
            f"{later[0].step}, expected one of them. Pipelines over hosts, and loops of one's own that reduce by "
            "themselves a state that is sharded over hosts, cannot be compared"
        )
    for name, found in later[0].sums.items():
        if found.reduction == "fast":
            raise StateError(
                f"replay of step {step}: found the sum {name!r} added up as floats, expected an exact one: the bits of "
                'a fast sum depend on which hosts were alive. Train with reduction="exact"'
            )
        if "of one host" not in found.replica:
            raise StateError(
                f"replay of step {step}: found the sum {name!r} of replicas on {found.replica}, expected replicas on "
                "one host: their bits depend on their devices, which one machine does not have"
            )
    return later[0].step


def describe_other_script(recorded: RunEntry, computed: RunEntry) -> str:
    """Return what differs between the script of the job and that of the replay; "" if nothing does."""
    common = sorted(recorded.script.keys() & computed.script.keys())
    found = [
        f"{name} was {recorded.script[name]}, is {computed.script[name]}"
        for name in common
        if recorded.script[name] != computed.script[name]
    ]
    if recorded.num_devices != computed.num_devices:
        found.append(f"devices of a host were {recorded.num_devices}, are {computed.num_devices}")
    more = len(found) - MAX_NAMED
    return "; ".join(found[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def compare_digests(recorded: RecordedRun, computed: Sequence[DigestEntry]) -> list[ComparedDigest]:
    """Return a row for each digest that was computed, beside what was committed.

    Raises:
        StateError: a sum is of other microbatches, or of other replicas, than in the job.
    """
    committed = {
        step: list(entries)
        for step, entries in itertools.groupby(recorded.steps, key=lambda entry: entry.step)
    }
    rows: list[ComparedDigest] = []
    for found in computed:
        if not isinstance(found, StepDigests):
            continue
        theirs = committed.get(found.step, [])
        # A job that went back has done the step again: what it goes on from is of the newest generation.
        newest = max((entry.generation for entry in theirs), default=0)
        theirs = [entry for entry in theirs if entry.generation == newest]
        for name, digest in found.sums.items():
            recorded_sums = [entry.sums[name] for entry in theirs if name in entry.sums]
            for one in recorded_sums:
                _check_same_microbatches(found.step, name, one, digest)
            rows.append(
                _compare(found.step, f"sum {name!r}", [one.digest for one in recorded_sums], digest.digest)
            )
        rows.append(_compare(found.step, "state", [entry.state for entry in theirs], found.state))
    return rows


def _compare(step: int, what: str, committed: Sequence[str], computed: str) -> ComparedDigest:
    distinct = sorted(set(committed) - {""})
    return ComparedDigest(
        step=step,
        what=what,
        committed=", ".join(distinct),
        computed=computed,
        is_equal=distinct == [computed] if distinct and computed else None,
    )


def _check_same_microbatches(step: int, name: str, committed: SumDigest, computed: SumDigest) -> None:
    for what, theirs, ours in (
        ("microbatches", committed.num_microbatches, computed.num_microbatches),
        ("replicas", committed.replica, computed.replica),
        ("reduction", committed.reduction, computed.reduction),
    ):
        if theirs != ours:
            raise StateError(
                f"replay of step {step}: found other {what} in the sum {name!r}: {ours}, expected {theirs} as in the "
                "job. Run the script with the batch size, the devices and the options of the job"
            )
