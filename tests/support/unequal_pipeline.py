"""A pipelined job whose hosts have unequal numbers of devices for some steps, and its invariants."""

from pipelined_job import UNITS, PipelinedJob, check_evaluations_agree, find_digests, run_alone
from tiny_job import read_logs

from resilient_jax.events import EventKind

CLOSE = 2e-3
"""Relative, of losses: gradients differ in the last bits, and Adam divides by small ones."""


class UnequalPipelinedJob(PipelinedJob):
    """All hosts have the same bits; those of an undisturbed run as long as all have the axes of the job."""

    def check_steps(self) -> None:
        """Check the bits of every step on all hosts, and against an undisturbed run."""
        found: dict[int, dict[str, set[str]]] = {}
        losses: dict[int, set[float]] = {}
        rows = [row for own in read_logs(self.work).values() for row in own]
        for row in rows:
            losses.setdefault(row["step"], set()).add(row["loss"])
            for unit, digest in row["digests"].items():
                found.setdefault(row["step"], {}).setdefault(unit, set()).add(digest)
        assert sorted(found) == list(range(len(found))), "a step is missing"
        words = [word for word in self.words if word.startswith("rows=")]
        alone, _ = run_alone(self.work, len(found), self.axes, words)
        first = self._find_first_unequal(rows)
        for row in alone:
            step = row["step"]
            assert len(found[step]) == UNITS, f"step {step}: some unit was on no host that lived"
            for unit, digest in row["digests"].items():
                assert len(found[step][unit]) == 1, f"step {step}, unit {unit}: hosts have other bits"
                assert step >= first or found[step][unit] == {digest}, f"step {step}, unit {unit}: other bits"
            (loss,) = losses[step]
            assert abs(loss - row["loss"]) < CLOSE * row["loss"], f"step {step}"
        assert len(find_digests(self.job.read_output())) == 1, "hosts have other results"
        assert not [event for event in self.job.read_events() if event.kind is EventKind.STATE_DIFFERS]
        check_evaluations_agree(self.work)

    def _find_first_unequal(self, rows: list[dict]) -> int:
        """Return the first step that was committed by hosts of unequal axes."""
        unequal = {
            event.generation
            for event in self.job.read_events()
            if event.kind is EventKind.PIPELINE_FORMED and "devices)" in str(event.detail["cut"])
        }
        return min((row["step"] for row in rows if row["generation"] in unequal), default=len(rows))
