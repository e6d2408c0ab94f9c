"""The invariants of membership, read from the events of all hosts. Pure.

Every decision of a leader is a transaction of the store, and its event has the transaction's revision and the leader's
fencing token. So the order of decisions is known even if a leader was stopped before it wrote its event.
"""

from collections.abc import Iterator, Sequence

from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.generation import GenerationPhase
from tests.chaos.invariants import Invariant, Violation

PHASE_ORDER = {phase: place for place, phase in enumerate(GenerationPhase)}


def check_membership(events: Sequence[Event]) -> list[Violation]:
    """Return the violations in the events of all hosts so far."""
    return [*_two_leaders(events), *_numbers(events), *_forms(events), *_without_reason(events)]


def _decisions(events: Sequence[Event]) -> list[Event]:
    found = [e for e in events if e.kind is EventKind.GENERATION_PHASE and "revision" in e.detail]
    return sorted(found, key=lambda event: int(event.detail["revision"]))


def _two_leaders(events: Sequence[Event]) -> Iterator[Violation]:
    elected: dict[int, str] = {}
    for event in events:
        if event.kind is EventKind.LEADER_ELECTED:
            token = int(event.detail["token"])
            if elected.setdefault(token, event.host) != event.host:
                text = f"token {token} was given to {elected[token]} and to {event.host}"
                yield Violation(invariant=Invariant.SINGLE_LEADER, description=text)
    newest: Event | None = None
    for event in _decisions(events):
        if newest is not None and int(event.detail["token"]) < int(newest.detail["token"]):
            text = f"{event.host} decided with token {event.detail['token']} after {newest.host} had with "
            yield Violation(invariant=Invariant.SINGLE_LEADER, description=f"{text}{newest.detail['token']}")
        newest = event


def _numbers(events: Sequence[Event]) -> Iterator[Violation]:
    before: Event | None = None
    for event in _decisions(events):
        if before is not None:
            found, last = event.generation or 0, before.generation or 0
            phase, last_phase = str(event.detail["phase"]), str(before.detail["phase"])
            if found < last or (
                found == last and not _may_follow(GenerationPhase(phase), GenerationPhase(last_phase))
            ):
                text = f"generation {found} ({phase}) was published after generation {last} ({last_phase})"
                yield Violation(invariant=Invariant.GENERATION_NUMBERS, description=text)
        before = event


def _may_follow(phase: GenerationPhase, last: GenerationPhase) -> bool:
    """Return whether `phase` may follow `last` under one generation number: see `membership/rules.py`.

    An active generation is written again when its record changes.
    """
    if phase is last:
        return phase is GenerationPhase.ACTIVE
    if phase is GenerationPhase.QUIESCE:  # unplanned: always the first phase of a number
        return False
    return PHASE_ORDER[phase] > PHASE_ORDER[last]


def _forms(events: Sequence[Event]) -> Iterator[Violation]:
    """Yield a violation for each generation whose members have formed different worlds."""
    seen: dict[int, tuple[str, int]] = {}
    for event in events:
        if event.kind is EventKind.WORLD_FORMED and event.generation is not None:
            form = str(event.detail["change"]), int(event.detail["hosts"])
            if seen.setdefault(event.generation, form) != form:
                other = seen[event.generation]
                text = f"generation {event.generation} is {form} on {event.host}, and {other} elsewhere"
                yield Violation(invariant=Invariant.GENERATION_NUMBERS, description=text)


def _without_reason(events: Sequence[Event]) -> Iterator[Violation]:
    for event in _decisions(events):
        if event.detail["phase"] in (GenerationPhase.QUIESCE, GenerationPhase.PAUSE) and not event.detail.get(
            "reason"
        ):
            text = f"generation {event.generation} ({event.detail['phase']}) has no reason"
            yield Violation(invariant=Invariant.EVENTS, description=text)
