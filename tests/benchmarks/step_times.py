"""When each host ended each step, in files that a benchmark's script writes and the benchmark reads."""

import os
import time
from pathlib import Path

import msgspec

import resilient_jax as rj


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a step in a process.

    Attributes:
        process: its id.
        step: its number.
        generation: in which it was made.
        at_s: monotonic seconds, which all processes of a machine share.
    """

    process: int
    step: int
    generation: int
    at_s: float


_DECODER = msgspec.json.Decoder(StepTime)


class StepTimeWriter:
    """A callback that appends a line for each step to a file of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"times-{os.getpid()}.jsonl"

    def __call__(self, report: rj.StepReport) -> None:
        """Write when this step of a trainer ended."""
        if not report.is_evaluation:
            self.write(report.step - 1, report.generation)

    def write(self, step: int, generation: int) -> None:
        """Write that a step ends now."""
        line = StepTime(process=os.getpid(), step=step, generation=generation, at_s=time.monotonic())
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_step_times(folder: Path) -> list[StepTime]:
    """Return the steps of all processes, in order of time; a line that a killed process left half is left out."""
    lines = [line for path in folder.glob("times-*.jsonl") for line in path.read_bytes().splitlines()]
    found = [_DECODER.decode(line) for line in lines if line.endswith(b"}")]
    return sorted(found, key=lambda one: one.at_s)
