"""Pipelined jobs whose hosts have unequal numbers of devices for some steps, and their invariants."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.events import EventKind
from tests.support.pipelined_job import (
    UNITS,
    PipelinedJob,
    check_evaluations_agree,
    find_digests,
    read_alone,
    read_restored,
    read_steps,
    run_alone,
)

CLOSE = 2e-3
"""Relative, of losses: gradients differ in the last bits, and Adam divides by small ones."""


class UnequalPipelinedJob(PipelinedJob):
    """All hosts have the same bits; those of an undisturbed run as long as all have the axes of the job."""

    def check_steps(self) -> None:
        """Check the bits of every step on all hosts, and against an undisturbed run."""
        events = self.job.read_events()
        assert not [event for event in events if event.kind is EventKind.STATE_DIFFERS]
        unequal = {
            event.generation
            for event in events
            if event.kind is EventKind.PIPELINE_FORMED and "devices)" in str(event.detail["cut"])
        }
        first = min(row["step"] for row in read_steps(self.work) if row["generation"] in unequal)
        check_unequal_steps(self.work, self.job.read_output(), first, self.axes)


def check_unequal_steps(
    work: Path, output: str, first_unequal: int, axes: Mapping[str, int], words: Sequence[str] = ()
) -> None:
    """Check the bits of every step on all hosts, and against an undisturbed run.

    Args:
        work: folder of the job.
        output: what it has printed.
        first_unequal: the first step that hosts of unequal axes committed.
        axes: of the devices of a host that has all.
        words: of the script, which change what it computes.
    """
    found: dict[int, dict[str, dict[int, set[str]]]] = {}
    losses: dict[int, set[float]] = {}
    rows = read_steps(work)
    for row in rows:
        losses.setdefault(row["step"], set()).add(row["loss"])
    for row in [*rows, *read_restored(work)]:
        for unit, digest in row["digests"].items():
            by_generation = found.setdefault(row["step"], {}).setdefault(unit, {})
            by_generation.setdefault(row["generation"], set()).add(digest)
    assert sorted(found) == list(range(len(found))), "a step is missing"
    total = len(found)
    for row in read_alone(run_alone(total, axes, words), total):
        step = row["step"]
        assert len(found[step]) == UNITS, f"step {step}: some unit was on no host that lived"
        for unit, digest in row["digests"].items():
            # A step that is done again in the next generation may be computed with other axes.
            for digests in found[step][unit].values():
                assert len(digests) == 1, f"step {step}, unit {unit}: hosts have other bits"
                assert step >= first_unequal or digests == {digest}, f"step {step}, unit {unit}: other bits"
        for loss in losses[step]:
            assert abs(loss - row["loss"]) < CLOSE * row["loss"], f"step {step}"
    assert len(find_digests(output)) == 1, "hosts have other results"
    check_evaluations_agree(work)
