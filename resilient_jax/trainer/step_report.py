"""What a run says of itself: to callbacks, and to a JSON-lines log."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from resilient_jax.telemetry.log_file import LogFile
from resilient_jax.trainer.training_state import TrainingState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What is known after a step, or after an evaluation.

    Attributes:
        step: how many steps are committed.
        metrics: "loss", "grad_norm" and the loss's own; of an evaluation those with "eval_" in front, alone. Means over
            the microbatches, the same bits on every host.
        seconds: that it took on this host.
        host_index: 0 is the one that prints and saves.
        generation: number of the membership.
        is_evaluation: whether an evaluation was made, rather than a step.
        state: the training state, as it is kept: whole on this host's devices, or, if sharded, on a mesh over all
            hosts, of which this one has pieces. Read it, but keep nothing of it: the devices go away when the
            membership changes, and whoever holds arrays on them holds their memory.
    """

    step: int
    metrics: Mapping[str, float]
    duration_s: float
    host_index: int
    generation: int
    is_evaluation: bool
    state: TrainingState


Callback = Callable[[StepReport], object]
"""Called on every host after each committed step and each evaluation.

True (and nothing else) stops the training: it must be decided from the step and the metrics alone, so that all hosts
decide alike; one that goes on alone waits for the others. A host that fetches a state instead of computing it, because
it was behind, is not called for that step.
"""


class JsonLog:
    """One JSON line a report, appended to `<host>.jsonl`. A disk that is full does not stop the training."""

    def __init__(self, directory: str | Path, host: str) -> None:
        self._file = LogFile(Path(directory) / f"{host}.jsonl")

    def write(self, report: StepReport) -> None:
        """Appends a report. Numbers that are not finite are null: JSON has no others."""
        line = {
            "step": report.step,
            **report.metrics,
            "seconds": round(report.duration_s, 6),
            "generation": report.generation,
        }
        self._file.write(msgspec.json.encode(line))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
