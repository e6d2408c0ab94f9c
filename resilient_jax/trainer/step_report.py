"""Reports of a run: to callbacks, and to a JSON-lines log."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax
import msgspec
import numpy as np

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError
from resilient_jax.telemetry.log_file import LogFile
from resilient_jax.trainer.training_state import State
from resilient_jax.worker.world import World


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of a step or of an evaluation.

    Attributes:
        step: how many steps are committed.
        metrics: "loss", "grad_norm" and the metrics of the loss; of an evaluation only those with the prefix `eval_`.
            Means over the microbatches, the same bits on every host.
        duration_s: seconds of the step or evaluation on this host.
        host_index: host 0 prints and saves.
        generation: the number of the membership.
        is_evaluation: whether this is an evaluation, rather than a step.
        state: the training state, as it is kept: replicated on this host's devices, or sharded on a mesh over all
            hosts, with an `rj.RaveledArray` in place of most arrays; of a pipeline a `PipelinedState`, of whose units
            this host has some. Read it, but keep no reference: the next step deletes its arrays, and devices go away
            when the membership changes.
    """

    step: int
    metrics: Mapping[str, float]
    duration_s: float
    host_index: int
    generation: int
    is_evaluation: bool
    state: State


class Callback(Protocol):
    """A function that is called on every host after each committed step and each evaluation.

    Returning True stops training, None or False goes on, anything else is refused. Decide by the step and the metrics
    alone, so that all hosts decide alike; a host that continues alone would wait for the others. A host that was
    behind, and fetches the state of a step instead of computing it, does not call its callbacks for that step.
    """

    def __call__(self, report: StepReport, /) -> object:
        """Look at the report, and return True to stop training."""
        ...


def wants_to_stop(callback: Callback, report: StepReport) -> bool:
    """Call a callback; return whether it stops training.

    Raises:
        CallerError: the callback returns something else than a truth value or None.
    """
    answer = callback(report)
    if answer is None or isinstance(answer, bool | np.bool_):
        return bool(answer)
    if isinstance(answer, jax.Array | np.ndarray) and answer.shape == () and answer.dtype == bool:
        return bool(answer)
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    raise CallerError(
        f"callback {name}: found {describe_value(answer)} as its result, expected True to stop training, or None or "
        "False to go on"
    )


class ReportedEvaluations:
    """Which evaluation was reported last: a failure in the step after it makes all hosts evaluate again."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._generation: int | None = None

    def was_reported(self, world: World, step: int) -> bool:
        """Return whether some living host has reported the evaluation of this step.

        Every host must call it before each evaluation.
        """
        is_first, self._generation = self._generation != world.generation, world.generation
        return is_first and bool(world.all_reduce(np.array([self._step == step], np.int32))[0])

    def note(self, step: int) -> None:
        """Note that the evaluation of this step is done, and is reported if it was not."""
        self._step = step


class JsonLog:
    """A log with one JSON line per report, in `<host>.jsonl`. A full disk does not stop training."""

    def __init__(self, directory: str | Path, host: str) -> None:
        self._file = LogFile(Path(directory) / f"{host}.jsonl")

    def write(self, report: StepReport) -> None:
        """Append a report. Non-finite values become null: JSON has none."""
        line = {
            "step": report.step,
            **report.metrics,
            "duration_s": round(report.duration_s, 6),
            "generation": report.generation,
        }
        self._file.write(msgspec.json.encode(line))

    def close(self) -> None:
        """Close the file; a later report opens it again."""
        self._file.close()
