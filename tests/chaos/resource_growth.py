"""The growth of long-lived processes in memory and descriptors, from the tenth incident of each on. Pure."""

import dataclasses
from collections.abc import Iterable, Sequence

SETTLING_INCIDENTS = 10
"""Incidents after which a process has loaded and opened all that it will ever need."""
WINDOW_SAMPLES = 5
"""Samples whose minimum counts: for some seconds a process still has the resources of the previous world."""
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A process after an incident.

    Attributes:
        name: the kind of process, and whether its host leads: a leader needs more memory.
        start_ticks: distinguishes the process from a later one with the same pid.
    """

    name: str
    pid: int
    start_ticks: int
    rss_bytes: int
    descriptors: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResourceGrowth:
    """The largest growth of any process; 0 if no process ran for more than `SETTLING_INCIDENTS` incidents.

    Attributes:
        rss_mib, rss_process: memory, and the name of the process.
        late_rss_mib: growth since the middle of its life, when caches with a limit, as the store's history, are full.
        descriptors, descriptors_process: open descriptors, and the name of the process.
        processes: the number of processes that ran long enough.
    """

    rss_mib: float = 0.0
    rss_process: str = ""
    late_rss_mib: float = 0.0
    descriptors: int = 0
    descriptors_process: str = ""
    processes: int = 0


def measure_growth(samples: Iterable[ProcessSample]) -> ResourceGrowth:
    """Return the growth of each process since its `SETTLING_INCIDENTS`th sample.

    Args:
        samples: in order of time.
    """
    series: dict[tuple[int, int, str], list[ProcessSample]] = {}
    for sample in samples:
        series.setdefault((sample.pid, sample.start_ticks, sample.name), []).append(sample)
    old = [found[SETTLING_INCIDENTS - 1 :] for found in series.values() if len(found) > SETTLING_INCIDENTS]
    if not old:
        return ResourceGrowth()
    rss, rss_of = max((_growth([s.rss_bytes for s in run]), run[0].name) for run in old)
    descriptors, descriptors_of = max((_growth([s.descriptors for s in run]), run[0].name) for run in old)
    return ResourceGrowth(
        rss_mib=rss / MIB,
        rss_process=rss_of,
        late_rss_mib=max(_growth([s.rss_bytes for s in run[len(run) // 2 :]]) for run in old) / MIB,
        descriptors=descriptors,
        descriptors_process=descriptors_of,
        processes=len(old),
    )


def _growth(values: Sequence[int]) -> int:
    """Return the growth from the minimum of the first window to that of the last; the windows do not overlap."""
    window = max(1, min(WINDOW_SAMPLES, len(values) // 2))
    return min(values[-window:]) - min(values[:window])
