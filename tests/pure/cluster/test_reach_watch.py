"""When an agent looks whom it reaches, and at whom."""

import pytest

from resilient_jax.cluster.reach_watch import MAX_MEMBERS, PATIENCE_S, choose_members, must_look
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.protocol.generation import FailedAttempts, Generation, GenerationPhase, Member, Membership
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.worker_report import WorkerReport, WorldPlace
from resilient_jax.protocol.worker_tasks import OverdueTask, WorkerTask

NUMBER = GenerationNumber(3)
HOST = HostName("h0")
SOON_S, LATE_S = PATIENCE_S / 2, PATIENCE_S * 2
OVERDUE = OverdueTask(task=WorkerTask.SUM, step=7, place="`f`, line 1", silent_s=9.0, deadline_s=4.0)
STEPS, FORMED, WAITS = (
    WorkerReport(generation=NUMBER, place=WorldPlace(has_formed=True, has_finished_step=True)),
    WorkerReport(generation=NUMBER, place=WorldPlace(has_formed=True)),
    WorkerReport(generation=NUMBER),
)
HANGS = change_fields(STEPS, overdue=OVERDUE)


def make_generation(phase: GenerationPhase, count: int = 3, attempts: int = 0) -> Generation:
    members = tuple(
        Member(host=HostName(f"h{seat}"), incarnation=Incarnation(1), seat=Seat(seat), endpoint=f"h{seat}:1")
        for seat in range(count)
    )
    return Generation(
        number=NUMBER,
        phase=phase,
        membership=Membership(members=members),
        failures=FailedAttempts(attempts=attempts),
    )


@pytest.mark.parametrize(
    ("phase", "attempts", "report", "waited_s", "expected"),
    [
        # A death explains that members stop, a failure without one does not.
        (GenerationPhase.QUIESCE, 0, WAITS, LATE_S, False),
        (GenerationPhase.QUIESCE, 1, WAITS, 0.0, True),
        (GenerationPhase.FORM, 0, WAITS, SOON_S, False),
        (GenerationPhase.FORM, 0, WAITS, LATE_S, True),
        (GenerationPhase.FORM, 1, WAITS, SOON_S, True),
        (GenerationPhase.FORM, 1, FORMED, LATE_S, False),
        # What it formed was an earlier world.
        (GenerationPhase.FORM, 0, WorkerReport(place=WorldPlace(has_formed=True)), LATE_S, True),
        (GenerationPhase.ACTIVE, 0, FORMED, SOON_S, False),
        (GenerationPhase.ACTIVE, 0, FORMED, LATE_S, True),
        (GenerationPhase.ACTIVE, 0, STEPS, LATE_S, False),
        (GenerationPhase.ACTIVE, 0, HANGS, 0.0, True),
        (GenerationPhase.PAUSE, 0, HANGS, 0.0, True),
        (GenerationPhase.BOUNDARY, 0, STEPS, LATE_S, False),
        (GenerationPhase.FINISHED, 1, HANGS, LATE_S, False),
    ],
)
def test_it_looks_where_members_do_not_go_on(
    phase: GenerationPhase, attempts: int, report: WorkerReport, waited_s: float, *, expected: bool
) -> None:
    generation = make_generation(phase, attempts=attempts)
    assert must_look(generation, HOST, report, waited_s) is expected
    assert not must_look(generation, HostName("other"), report, waited_s), (
        "not at hosts that it trains without"
    )
    assert not must_look(make_generation(phase, 1, attempts), HOST, report, waited_s), "nor at itself"


@pytest.mark.parametrize("count", [2, 3, MAX_MEMBERS + 1, MAX_MEMBERS + 2, 3 * MAX_MEMBERS])
def test_in_turn_it_looks_at_all_and_two_hosts_at_each_other_in_the_same_turn(count: int) -> None:
    generation = make_generation(GenerationPhase.FORM, count)
    num_turns = -(-(count - 1) // MAX_MEMBERS)
    turns: dict[frozenset[HostName], list[int]] = {}
    for member in generation.membership.members:
        seen: set[HostName] = set()
        for number in range(num_turns):
            chosen = [other.host for other in choose_members(generation, member.host, number)]
            assert 0 < len(chosen) <= MAX_MEMBERS
            assert not seen & set(chosen)
            seen |= set(chosen)
            for host in chosen:
                turns.setdefault(frozenset((member.host, host)), []).append(number)
        assert seen == {other.host for other in generation.membership.members} - {member.host}
    apart = [numbers for numbers in turns.values() if len(set(numbers)) != 1]
    # The last place of a turn has one of two hosts that are as far away.
    assert len(apart) <= count * (num_turns - 1)
