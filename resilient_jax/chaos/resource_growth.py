"""Whether the long-lived processes grow: memory and descriptors, from the tenth incident of each on. Pure."""

import dataclasses
from collections.abc import Iterable, Sequence

SETTLED = 10
"""Incidents after which a process has loaded and opened all that it ever does."""
WINDOW = 5
"""Samples whose least counts: for some seconds after a change a process holds what belonged to the world before."""
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A process after an incident.

    Attributes:
        name: what it is, and whether it leads: a leader holds more.
        started: tells it from a later one with the same number.
    """

    name: str
    process: int
    started: int
    rss_bytes: int
    descriptors: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The largest of any process; 0 if none has lived that long.

    Attributes:
        rss_mib, rss_of: memory, and the name of the process.
        late_rss_mib: since the middle of its life: what fills up to a limit, as the store's history does, is full then.
        descriptors, descriptors_of: the same of what it has open.
        processes: that have lived that long.
    """

    rss_mib: float = 0.0
    rss_of: str = ""
    late_rss_mib: float = 0.0
    descriptors: int = 0
    descriptors_of: str = ""
    processes: int = 0


def measure_growth(samples: Iterable[Sample]) -> Growth:
    """How much each process has grown since its `SETTLED`th sample, of those in which it was the same.

    Args:
        samples: in order of time.
    """
    series: dict[tuple[int, int, str], list[Sample]] = {}
    for sample in samples:
        series.setdefault((sample.process, sample.started, sample.name), []).append(sample)
    old = [found[SETTLED - 1 :] for found in series.values() if len(found) > SETTLED]
    if not old:
        return Growth()
    rss, rss_of = max((_growth([s.rss_bytes for s in run]), run[0].name) for run in old)
    descriptors, descriptors_of = max((_growth([s.descriptors for s in run]), run[0].name) for run in old)
    return Growth(
        rss_mib=rss / MIB,
        rss_of=rss_of,
        late_rss_mib=max(_growth([s.rss_bytes for s in run[len(run) // 2 :]]) for run in old) / MIB,
        descriptors=descriptors,
        descriptors_of=descriptors_of,
        processes=len(old),
    )


def _growth(values: Sequence[int]) -> int:
    """From the beginning to the end, each by the least of a window; the windows do not overlap."""
    window = max(1, min(WINDOW, len(values) // 2))
    return min(values[-window:]) - min(values[:window])
