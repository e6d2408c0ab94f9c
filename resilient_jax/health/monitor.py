"""The monitor of a job: timings of steps in, findings out. Pure.

A step is judged when all hosts have told of it, because they tell at different times. A host is compared with itself
(what its own past predicts for the lengths of its documents) and with its peers (the median of observed over predicted
in the same step): what slows all hosts alike is no host's fault. A host that was slow from its first step on, or
becomes so little by little, with fits that follow, is found where its fits are compared with those of its peers. What
is found:

    microbatches slow, half of it a wait for data        input
    microbatches slow                                    compute
    update slow, and clearly more so than microbatches   memory
    reduction slow on all hosts, the last one included   link
    mail slow to be received, of a pipeline              link

A host that waits in the reduction for another is not slow: what it waits for is in none of the durations above.
"""

import collections
import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from resilient_jax.health.duration_model import DurationModel, WorkSample
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.step_parts import LINKS, StepPart, list_samples, make_mean_sample
from resilient_jax.health.work_series import (
    MAX_STREAK_SAMPLES,
    SUSPECT_RATIO,
    SeriesState,
    SuspicionRate,
    WorkSeries,
)
from resilient_jax.protocol.step_timing import StepTiming

MIN_EXCESS_S: Final = 0.01
"""What a step must take longer for a finding: the scheduler of a busy machine takes as much from any process."""
MIN_TOTAL_EXCESS_S: Final = 0.25
"""The same of all steps since it is slow, each counted as the median of them: of steps of milliseconds a few in a row
say little, and cost little; and one long step among them says nothing about the others."""
MIN_INPUT_SHARE: Final = 0.5
"""Of the excess, for it to be the input's."""
SMALL_GROUP: Final = 32
"""Up to so many peers a series is compared with the median of the others; of more, with the median of all."""
COMPARED_AFTER_STEPS: Final = 8
"""After a fit, it is compared with those of peers, which have theirs by then."""
NOISE_SPREADS: Final = 2.0
"""In robust standard deviations of a step."""
MAX_OPEN_STEPS: Final = 16
"""Of which not all hosts have told: then the oldest is judged by those that have, if these are half of all."""
USUAL_INPUT_STEPS: Final = 16
"""Whose median is what a host usually waits for its data."""


class FindingOpened(msgspec.Struct, frozen=True):
    """Something is slow from now on."""

    finding: Finding


class FindingClosed(msgspec.Struct, frozen=True):
    """Something is no longer slow, or gone.

    Attributes:
        reason: text for people.
    """

    finding: Finding
    step: int
    reason: str


FindingChange = FindingOpened | FindingClosed


class _Excess(msgspec.Struct, frozen=True):
    """What a suspicious step took.

    Attributes:
        observed_s: time of the whole step.
        excess_s: time beyond what the peers made likely.
        input_s: time beyond the usual wait for data.
    """

    observed_s: float
    predicted_s: float
    excess_s: float
    input_s: float


class _Watched(msgspec.Struct):
    """A series with what decides the kind of its findings."""

    series: WorkSeries
    first_step: int
    finding: Finding | None = None
    excesses: collections.deque[_Excess] = msgspec.field(
        default_factory=lambda: collections.deque(maxlen=MAX_STREAK_SAMPLES)
    )
    """Of the suspicious steps in a row, the newest of them."""
    usual_input_s: collections.deque[float] = msgspec.field(
        default_factory=lambda: collections.deque(maxlen=USUAL_INPUT_STEPS)
    )
    compared_step: int | None = None
    """When its fit was last compared with those of peers, and was like theirs."""

    @property
    def excess_s(self) -> float:
        """What all suspicious steps took longer, if each took as much longer as the median of them."""
        return _find_median(self.excesses, "excess_s") * len(self.excesses)

    @property
    def input_share(self) -> float:
        """How much of what they took longer are waits for data."""
        total_s = sum(one.excess_s for one in self.excesses)
        return sum(one.input_s for one in self.excesses) / total_s if total_s else 0.0


class _Measured(msgspec.Struct):
    """One series in the step that is judged."""

    part: StepPart
    watched: _Watched
    samples: list[WorkSample]
    input_s: float
    ratio: float
    usual: float = 1.0
    """The median ratio of its peers in this step."""

    @property
    def observed_s(self) -> float:
        return sum(sample.seconds for sample in self.samples)


class HealthMonitor:
    """Watches the hosts of a job.

    Args:
        groups: hosts that do the same work, by host, such as those of one stage of a pipeline; hosts that are not named
            are one group. How far a host that is alone in its group is from its own past is compared with how far all
            others are from theirs; its seconds with nobody's, so one that was slow from the start is not found.
    """

    def __init__(self, groups: Mapping[str, str] | None = None) -> None:
        self._groups = dict(groups or {})
        self._rate = SuspicionRate()
        self._watched: dict[StepPart, _Watched] = {}
        self._members: frozenset[str] = frozenset()
        self._open: dict[int, dict[str, StepTiming]] = {}
        """By step and host, what is not judged yet."""
        self._judged_step = -1

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is slow now."""
        return tuple(w.finding for w in self._watched.values() if w.finding is not None)

    @property
    def knows_links(self) -> bool:
        """Whether it is known what reductions or mail take between these hosts, and none is slow."""
        found = [self._watched[part] for part in LINKS if part in self._watched]
        return bool(found) and all(w.series.model is not None and w.finding is None for w in found)

    def set_members(self, hosts: Iterable[str], step: int) -> list[FindingChange]:
        """Take these as the hosts that take part, from a step on; findings about others end."""
        before, self._members = self._members, frozenset(hosts)
        self._open.clear()
        self._judged_step = step - 1
        over = {
            p: "the host takes no part any more"
            for p in self._watched
            if p.host and p.host not in self._members
        }
        if before != self._members:
            # Between other hosts reductions and mail take another time, which is learned anew.
            over |= {part: "other hosts take part" for part in LINKS if part in self._watched}
        changes: list[FindingChange] = []
        for part, reason in over.items():
            if (finding := self._watched.pop(part).finding) is not None:
                changes.append(FindingClosed(finding, step, reason))
        return changes

    def observe(self, host: str, timing: StepTiming) -> list[FindingChange]:
        """Take in a host's timing of a step; return what changed.

        Args:
            timing: timing of any step; steps may be missing between two calls.
        """
        if host not in self._members or timing.step <= self._judged_step:
            return []
        told = self._open.setdefault(timing.step, {})
        told[host] = timing
        if len(told) == len(self._members):
            return self._judge_until(timing.step)
        if len(self._open) > MAX_OPEN_STEPS:
            return self._judge_until(min(self._open))
        return []

    # One step.

    def _judge_until(self, step: int) -> list[FindingChange]:
        """Judge this step and those before it that are still open, in order."""
        changes: list[FindingChange] = []
        for ready in sorted(number for number in self._open if number <= step):
            told = self._open.pop(ready)
            if 2 * len(told) >= len(self._members):
                changes += self._judge_step(ready, told)
        self._judged_step = step
        return changes

    def _judge_step(self, step: int, told: Mapping[str, StepTiming]) -> Iterator[FindingChange]:
        measured = [
            found
            for part, samples, input_s in list_samples(told, len(told) == len(self._members))
            if (found := self._measure(step, part, samples, input_s)) is not None
        ]
        self._compare(measured)
        # All ratios first: what kind of finding one is depends on the others of its host.
        states = [
            one.watched.series.judge(
                step, one.ratio, one.usual, one.samples, is_found=one.watched.finding is not None
            )
            for one in measured
        ]
        for one, state in zip(measured, states, strict=True):
            yield from self._conclude(step, one, state)
        for host in [host for host, timing in told.items() if not timing.works]:
            yield from self._judge_idle(step, host)

    def _measure(
        self, step: int, part: StepPart, samples: list[WorkSample], input_s: float
    ) -> _Measured | None:
        watched = self._watched.get(part)
        if watched is None:
            watched = self._watched[part] = _Watched(WorkSeries(self._rate), step)
        ratio = watched.series.measure(samples)
        if ratio is None:
            watched.usual_input_s.append(input_s)
            return None
        return _Measured(part, watched, samples, input_s, ratio)

    def _compare(self, measured: list[_Measured]) -> None:
        """Set the usual ratio of each: the median of those that do the same work, and are not known to be slow."""
        groups: dict[tuple[str, str | None], list[_Measured]] = {}
        for one in measured:
            groups.setdefault((one.part.name, self._groups.get(one.part.host)), []).append(one)
        for group in groups.values():
            healthy = [one for one in group if one.watched.finding is None]
            of_all = statistics.median(one.ratio for one in healthy) if healthy else 1.0
            for one in group:
                one.usual = of_all
                if len(group) <= SMALL_GROUP:
                    others = (
                        _list_other_ratios(one, group)
                        or _list_other_ratios(one, measured)
                        or _list_unexplained_ratios(one, measured)
                    )
                    one.usual = statistics.median(others) if others else 1.0

    def _conclude(self, step: int, one: _Measured, state: SeriesState) -> Iterator[FindingChange]:
        watched = one.watched
        self._add_excess(one, state)
        if watched.finding is not None:
            if state.is_healthy:
                closed, watched.finding = watched.finding, None
                yield FindingClosed(closed, step, "as fast as predicted again")
            return
        if state.is_slow:
            watched.finding = self._judge_change(one, state)
        elif watched.series.steps_since_fit == COMPARED_AFTER_STEPS:
            watched.finding = self._judge_fit(step, one)
        if watched.finding is not None:
            yield FindingOpened(watched.finding)

    def _add_excess(self, one: _Measured, state: SeriesState) -> None:
        watched = one.watched
        if not state.streak:
            watched.usual_input_s.append(one.input_s)
            watched.excesses.clear()
            return
        watched.excesses.append(
            _Excess(
                observed_s=one.observed_s,
                predicted_s=one.observed_s / one.ratio,
                excess_s=one.observed_s * (1 - 1 / state.ratio),
                input_s=one.input_s - statistics.median(watched.usual_input_s or [0.0]),
            )
        )

    # Verdicts.

    def _judge_change(self, one: _Measured, state: SeriesState) -> Finding | None:
        """Return a finding about a series that has changed; None: too little to matter, or another one says more."""
        watched = one.watched
        if watched.excess_s < max(MIN_TOTAL_EXCESS_S, MIN_EXCESS_S * state.streak):
            return None
        kind = self._find_kind(one.part, watched, state)
        if kind is None:
            return None
        compared = f"; its peers take {one.usual:.2f} times" if one.part not in LINKS else ""
        waits = (
            f", of which {_find_median(watched.excesses, 'input_s'):.3g} s are waits for data"
            if kind is FindingKind.INPUT
            else ""
        )
        return Finding(
            host=one.part.host,
            device=self._find_device(one.part),
            kind=kind,
            factor=state.typical_ratio,
            since_step=state.since_step,
            input_share=watched.input_share,
            evidence=(
                f"{one.part.describe()} took {_find_median(watched.excesses, 'observed_s'):.3g} s in a step instead "
                f"of {_find_median(watched.excesses, 'predicted_s'):.3g} s as predicted, {state.typical_ratio:.2f} "
                f"times as long (medians of {state.streak} steps){waits}{compared}"
            ),
        )

    def _find_kind(self, part: StepPart, watched: _Watched, state: SeriesState) -> FindingKind | None:
        """Return what is slow; None: another part of the host tells more about it."""
        if part in LINKS:
            return FindingKind.LINK
        works = [w for p, w in self._watched.items() if p.host == part.host and p.name == "work"]
        if part.name == "update":
            if any(w.finding is not None for w in works):
                return None
            ratios = [w.series.newest_ratio for w in works]
            # A processor at half speed updates slowly, too: its microbatches will say so, a step later at most.
            return (
                FindingKind.MEMORY if state.typical_ratio > SUSPECT_RATIO * max(ratios, default=1.0) else None
            )
        if watched.input_share >= MIN_INPUT_SHARE:
            return FindingKind.INPUT
        update = self._watched.get(StepPart(part.host, "update"))
        # An update of milliseconds is easily several times as long for once.
        is_memory = (
            update is not None
            and update.excess_s >= MIN_TOTAL_EXCESS_S
            and update.series.newest_ratio > SUSPECT_RATIO * state.typical_ratio
        )
        return FindingKind.MEMORY if is_memory else FindingKind.COMPUTE

    def _find_device(self, part: StepPart) -> int | None:
        slots = [p.slot for p in self._watched if p.host == part.host and p.name == part.name]
        return part.slot if len(slots) > 1 else None

    def _judge_fit(self, step: int, one: _Measured) -> Finding | None:
        """Return a finding about a host that is slow by its own fit, judging by the fits of its peers."""
        own = one.watched.series.model
        if one.part.name != "work" or own is None:
            return None
        tokens, squares = sum(s.tokens for s in one.samples), sum(s.squares for s in one.samples)
        models = sorted(self._list_peer_models(one.part), key=lambda model: model.predict_s(tokens, squares))
        if not models:
            return None
        own_s, peer = own.predict_s(tokens, squares), models[len(models) // 2]
        peer_s = peer.predict_s(tokens, squares)
        # By more than single steps of either vary: on a busy machine hosts differ for a while, by turns.
        noise = NOISE_SPREADS * max(own.spread, peer.spread)
        if own_s * (1 - noise) <= SUSPECT_RATIO * peer_s or own_s - peer_s < MIN_EXCESS_S:
            one.watched.compared_step = step
            return None
        watched = one.watched
        watched.series.replace_model(peer)
        since_step, when = watched.compared_step, "little by little"
        if since_step is None:
            since_step, when = watched.first_step, "from its first step on"
        return Finding(
            host=one.part.host,
            device=self._find_device(one.part),
            kind=FindingKind.COMPUTE,
            factor=own_s / peer_s,
            since_step=since_step,
            evidence=(
                f"{when} {one.part.describe()} took {own_s:.3g} s for what takes the median of its peers {peer_s:.3g} s"
            ),
        )

    def _judge_idle(self, step: int, host: str) -> Iterator[FindingOpened]:
        """Judge a host that gets no microbatches before it has a fit, by the few that it had: it was too slow."""
        for part, watched in self._watched.items():
            if part.host != host or part.name != "work" or watched.finding is not None:
                continue
            if watched.series.model is None and any(True for _ in self._list_peer_models(part)):
                samples = watched.series.fit_early()
                if samples:
                    mean = [make_mean_sample(samples)]
                    watched.finding = self._judge_fit(step, _Measured(part, watched, mean, 0.0, 1.0))
                if watched.finding is not None:
                    yield FindingOpened(watched.finding)

    def _list_peer_models(self, part: StepPart) -> list[DurationModel]:
        """Return the fits of others that do the same work and are not known to be slow, SMALL_GROUP at most."""
        group = self._groups.get(part.host)
        models = (
            watched.series.model
            for other, watched in self._watched.items()
            if other.name == part.name
            and other != part
            and self._groups.get(other.host) == group
            and watched.series.model is not None
            and watched.finding is None
        )
        return list(itertools.islice(models, SMALL_GROUP))


def _find_median(excesses: Collection[_Excess], name: str) -> float:
    """Return the median of an attribute; 0 of none."""
    return statistics.median(getattr(one, name) for one in excesses) if excesses else 0.0


def _list_other_ratios(one: _Measured, measured: Iterable[_Measured]) -> list[float]:
    """Return the ratios of the others of its name that are not known to be slow."""
    return [
        other.ratio
        for other in measured
        if other is not one and other.part.name == one.part.name and other.watched.finding is None
    ]


def _list_unexplained_ratios(one: _Measured, measured: Iterable[_Measured]) -> list[float]:
    """Return by what the others of its name, all known to be slow, are slower than that explains: what slows all alike
    slows them too.
    """
    return [
        other.ratio / other.watched.finding.factor
        for other in measured
        if other is not one and other.part.name == one.part.name and other.watched.finding is not None
    ]
