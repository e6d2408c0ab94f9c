"""The parts of a step, each of which is a series of durations: what hosts tell of a step, taken apart. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.health.duration_model import WorkSample
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming

MIN_DURATION_S: Final = 1e-5
"""What takes less is not predicted."""


class StepPart(msgspec.Struct, frozen=True):
    """What a series is of: the microbatches of a replica, a host's update, or the links between hosts.

    Attributes:
        host: "": the links between hosts.
        name: "work" or "update"; of links, "reduction" or "mail".
        slot: index of the host's replica.
    """

    host: str
    name: str
    slot: int = 0

    def describe(self) -> str:
        """Return the subject of a sentence that says what it took."""
        match self.name:
            case "work":
                return "its microbatches"
            case "update":
                return "its update of the state"
            case "mail":
                return "the mail of the host that received longest"
            case _:
                return "the reduction, when all hosts had come to it,"


REDUCTION: Final = StepPart("", "reduction")
MAIL: Final = StepPart("", "mail")
LINKS: Final = (REDUCTION, MAIL)


def list_samples(
    told: Mapping[str, StepTiming], are_all: bool
) -> Iterator[tuple[StepPart, list[WorkSample], float]]:
    """Yield each part of a step with its samples, and how long it waited for data.

    Args:
        told: timings by host.
        are_all: `told` has all hosts; else the last one to come to the reduction is not known.
    """
    for host, timing in told.items():
        if timing.is_disturbed:
            continue
        by_slot: dict[int, list[ReplicaWork]] = {}
        for work in timing.works:
            if work.seconds > MIN_DURATION_S:
                by_slot.setdefault(work.slot, []).append(work)
        for slot, works in by_slot.items():
            yield StepPart(host, "work", slot), list(map(_make_sample, works)), sum(w.input_s for w in works)
        if timing.update_s > MIN_DURATION_S:
            yield StepPart(host, "update"), [_make_plain_sample(timing.update_s)], 0.0
    if not are_all or any(timing.is_disturbed for timing in told.values()):
        return
    # The last host to come to the reduction waits for no other: what it takes is the reduction's own.
    shortest_s = min(timing.wait_s for timing in told.values())
    if shortest_s > MIN_DURATION_S:
        yield REDUCTION, [_make_plain_sample(shortest_s)], 0.0
    # The links of one host hold up a pipeline as much as those of all, and would not be seen in a sum over all.
    longest = max(told.values(), key=lambda timing: timing.received_s)
    if longest.received_s > MIN_DURATION_S:
        yield MAIL, [WorkSample(tokens=longest.received_bytes, squares=0, seconds=longest.received_s)], 0.0


def make_mean_sample(samples: Sequence[WorkSample]) -> WorkSample:
    """Return a sample of a mean step."""
    tokens, squares, seconds = (
        sum(of_sample) / len(samples)
        for of_sample in zip(*((s.tokens, s.squares, s.seconds) for s in samples), strict=True)
    )
    return WorkSample(tokens=tokens, squares=squares, seconds=seconds)


def _make_plain_sample(seconds: float) -> WorkSample:
    """Return a sample of what depends on no lengths."""
    return WorkSample(tokens=1, squares=0, seconds=seconds)


def _make_sample(work: ReplicaWork) -> WorkSample:
    return WorkSample(tokens=work.tokens, squares=work.squares, seconds=work.seconds)
