"""Figures of the control benchmark from its samples, and the costs of the machine as samples. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tests.benchmarks.control.machine_cost import MachineCost, MachineMeasurements

PLOTTED: Final = (
    ("microseconds of the leader for an event", ("event_us", "plain_event_us")),
    ("processor seconds of decisions", ("form_cpu_s", "shrink_cpu_s", "plain_form_cpu_s")),
    ("seconds until every agent knows", ("form_s", "shrink_active_s", "form_s_etcd", "shrink_active_s_etcd")),
    ("bytes", ("generation_bytes", "bytes_per_host_change")),
)
"""The title of each panel, and the names of its figures without the number of hosts."""
AIMS: Final = {
    "event_us_64": "below 200, and",
    "event_us_4096": "within 2 times",
    "form_s_4096": "2.0",
    "shrink_s_4096": "1.0",
    "leader_cpu_1024": "0.2",
    "bytes_per_host_change_1024": "2048",
    "form_s_etcd_4096": "2.0",
    "shrink_s_etcd_4096": "1.0",
    "leader_cpu_etcd_1024": "0.2",
    "real_agents": "64",
    "etcd_kill_gap_s": "1.0",
}

Samples = dict[str, list[float]]
"""What was measured for each figure, by its key."""


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of the benchmark has measured.

    Attributes:
        samples: of each figure.
        missing: what could not be measured, with the cause.
    """

    samples: Samples = msgspec.field(default_factory=dict)
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A median with the range of nine tenths of the samples; of fewer than 20 samples, of all."""

    median: float
    low: float
    high: float
    n: int


def summarize(samples: Sequence[float]) -> Figure:
    """Return the figure of some samples, to four significant digits.

    >>> summarize([3.0, 1.0, 2.0])
    Figure(median=2.0, low=1.0, high=3.0, n=3)
    """
    low, high = min(samples), max(samples)
    if len(samples) >= 20:
        low, *_, high = statistics.quantiles(samples, n=20, method="inclusive")
    median, low, high = (float(f"{value:.4g}") for value in (statistics.median(samples), low, high))
    return Figure(median=median, low=low, high=high, n=len(samples))


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that grow with the hosts: the number of hosts and the figure, by the figure's name."""

    title: str
    lines: dict[str, list[tuple[int, Figure]]]


class PlotData(msgspec.Struct, frozen=True, kw_only=True):
    """What the plot shows."""

    panels: list[Panel]


def make_plot_data(figures: Mapping[str, Figure]) -> PlotData:
    """Return what is plotted of these figures."""
    by_name: dict[str, list[tuple[int, Figure]]] = {}
    for key, figure in figures.items():
        name, _, size = key.rpartition("_")
        if size.isdigit():
            by_name.setdefault(name, []).append((int(size), figure))
    lines = [
        (
            title,
            {name: sorted(by_name[name], key=lambda found: found[0]) for name in names if name in by_name},
        )
        for title, names in PLOTTED
    ]
    return PlotData(panels=[Panel(title=title, lines=found) for title, found in lines if found])


def summarize_all(parts: Iterable[PartResult]) -> dict[str, Figure]:
    """Return the figure of each key of all parts."""
    return {key: summarize(found) for part in parts for key, found in part.samples.items()}


def make_line(
    figures: Mapping[str, Figure], parts: Iterable[PartResult], machine: str, load: tuple[float, float]
) -> msgspec.Struct:
    """Return the line of JSON, in which each median has a key of its own.

    Args:
        figures: of all parts.
        parts: what they have measured.
        machine: on which.
        load: processes that waited to run, of one minute, before and after.
    """
    fields = {
        **{key: figure.median for key, figure in figures.items()},
        "spread": {key: (figure.low, figure.high) for key, figure in figures.items()},
        "n": {key: figure.n for key, figure in figures.items()},
        "missing": {what: why for part in parts for what, why in part.missing.items()},
        "machine": machine,
        "load": load,
    }
    return msgspec.defstruct("ControlLine", list(fields))(**fields)


def make_machine_samples(measured: MachineMeasurements) -> Samples:
    """Return the samples of the machine, and those of the plain one with names that begin with `plain_`."""
    found: Samples = {}
    for prefix, by_size in (("", measured.ours), ("plain_", measured.plain)):
        for size, costs in by_size.items():
            found |= {f"{prefix}{key}_{size}": values for key, values in _collect(costs).items() if values}
    return found


def _collect(costs: Sequence[MachineCost]) -> Samples:
    by_kind: Samples = {}
    for cost in costs:
        for kind, times_us in cost.event_us.items():
            by_kind.setdefault(f"event_us_{kind}", []).extend(times_us)
    return {
        "event_us": [time_us for times_us in by_kind.values() for time_us in times_us],
        **by_kind,
        "form_cpu_s": [cost.form_s for cost in costs],
        "shrink_cpu_s": [cost.shrink_s for cost in costs if cost.shrink_s is not None],
        "generation_bytes": [float(cost.generation_bytes) for cost in costs],
        "status_bytes": [float(cost.status_bytes) for cost in costs],
    }
