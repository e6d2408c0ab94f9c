"""Data of the resilience plot, as the script that draws it reads them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tests.benchmarks.resilience.figures import RunFigures, median_of, rates_of
from tests.benchmarks.resilience.timeline import Timeline

DRAWN_EVERY: Final = 20
"""The rate whose runs are drawn over time; if it was not run, the most frequent failures are."""


class CommitCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Committed steps over time, in one system's run.

    Attributes:
        system: name of the system.
        at_s: time of each commit since the first that counts.
        steps: committed by then; decreases where steps are done again.
        struck_s: time of each failure.
        struck_steps: committed by then.
    """

    system: str
    at_s: list[float]
    steps: list[int]
    struck_s: list[float]
    struck_steps: list[int]


class ThroughputCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Effective throughput of one system by failure rate.

    Attributes:
        system: name of the system.
        failure_every: the rates, as steps between two failures.
        tokens_per_s: per live device, at each rate.
    """

    system: str
    failure_every: list[int]
    tokens_per_s: list[float]


class ResiliencePlot(msgspec.Struct, frozen=True, kw_only=True):
    """The two panels of the plot; `failure_every` is the rate of the runs in `lines`."""

    failure_every: int
    lines: list[CommitCurve]
    rates: list[ThroughputCurve]


def make_resilience_plot(
    runs: Sequence[RunFigures], timelines: Mapping[tuple[str, int], Timeline]
) -> ResiliencePlot:
    """Return the data of the plot: throughput of all runs, and commits over time of those at one rate."""
    rates = rates_of(runs) or sorted({run.failure_every for run in runs}, reverse=True)
    drawn = DRAWN_EVERY if DRAWN_EVERY in rates else rates[-1]
    systems = {
        system: sorted({run.failure_every for run in runs if run.system == system}, reverse=True)
        for system in dict.fromkeys(run.system for run in runs)
    }
    return ResiliencePlot(
        failure_every=drawn,
        lines=[
            make_commit_curve(system, line) for (system, rate), line in timelines.items() if rate == drawn
        ],
        rates=[
            ThroughputCurve(
                system=system,
                failure_every=rates,
                tokens_per_s=[median_of(runs, system, rate, lambda run: run.tokens_per_s) for rate in rates],
            )
            for system, rates in systems.items()
        ],
    )


def make_commit_curve(system: str, timeline: Timeline) -> CommitCurve:
    """Return the curve of one run, with times from its first commit that counts."""
    start_s = timeline.commits[0].at_s
    struck_steps = [
        max((c.step + 1 for c in timeline.commits if c.at_s <= fault.at_s), default=0)
        for fault in timeline.struck
    ]
    return CommitCurve(
        system=system,
        at_s=[commit.at_s - start_s for commit in timeline.commits],
        steps=[commit.step + 1 for commit in timeline.commits],
        struck_s=[fault.at_s - start_s for fault in timeline.struck],
        struck_steps=struck_steps,
    )
