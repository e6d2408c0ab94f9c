"""Each invariant finds its violations, and none in the records of a healthy job."""

import dataclasses
import functools
from collections.abc import Callable

import msgspec
import pytest

from resilient_jax.events import Event, EventKind
from resilient_jax.health.finding import FindingKind
from resilient_jax.protocol.ledger import LedgerEntry, MicrobatchEntry, RestoreEntry, StepEntry
from tests.chaos.expected_events import IncidentRecord, check_expected_events, check_findings
from tests.chaos.faults import BitFlip, ProcessKill, ProcessStop, SlowInput, SlowProcess
from tests.chaos.invariants import Invariant, format_timeline
from tests.chaos.ledger_invariants import (
    ReferenceStep,
    StateDigest,
    check_commits,
    check_completeness,
    combine_sums,
    read_reference,
)
from tests.chaos.manifest import FaultTarget, Incident, TargetPart, Trigger
from tests.chaos.membership_invariants import check_membership
from tests.chaos.resource_growth import (
    MIB,
    SETTLING_INCIDENTS,
    ProcessSample,
    ResourceGrowth,
    measure_growth,
)

HOSTS = ("host-0", "host-1")
OWNERS = {"train": ("host-0", "host-1", "host-0")}
REFERENCE = {
    step: ReferenceStep(digest=StateDigest(f"sha-{step}", f"{step:032x}"), microbatches={"train": 3})
    for step in range(4)
}


def commit(host: str, step: int, generation: int = 1, **changes: object) -> StepEntry:
    line = StepEntry(
        host=host,
        pid=7,
        generation=generation,
        step=step,
        num_hosts=2,
        replica=(),
        monotonic_s=100.0 * generation + step,
        state_sha256=f"sha-{step}",
        additive_digest=f"{step:032x}",
        owners=OWNERS,
    )
    return msgspec.structs.replace(line, **changes)


def good_lines() -> list[LedgerEntry]:
    """Return the ledger of two hosts: steps 0 and 1 in generation 1, then 2 and 3 in generation 2."""
    lines: list[LedgerEntry] = []
    for host in HOSTS:
        for step in range(4):
            generation = 1 if step < 2 else 2
            mine = [index for index, owner in enumerate(OWNERS["train"]) if owner == host]
            lines += [
                MicrobatchEntry(host=host, pid=7, generation=generation, step=step, index=index)
                for index in mine
            ]
            lines.append(commit(host, step, generation))
        lines.append(
            RestoreEntry(
                host=host,
                pid=7,
                generation=2,
                num_steps=2,
                num_hosts=2,
                replica=(),
                monotonic_s=150.0,
                state_sha256="sha-1",
                additive_digest=f"{1:032x}",
            )
        )
    return lines


def test_the_ledger_of_a_healthy_job_violates_nothing() -> None:
    assert check_commits(good_lines(), REFERENCE) == []
    assert check_completeness(good_lines(), 4, REFERENCE) == []


def change(
    lines: list[LedgerEntry], where: Callable[[LedgerEntry], bool], **changes: object
) -> list[LedgerEntry]:
    return [msgspec.structs.replace(line, **changes) if where(line) else line for line in lines]


def is_commit(line: LedgerEntry, host: str, step: int) -> bool:
    return isinstance(line, StepEntry) and line.host == host and line.step == step


BROKEN: dict[str, tuple[Invariant, Callable[[list[LedgerEntry]], list[LedgerEntry]]]] = {
    "other bits on one host": (
        Invariant.BITS,
        lambda lines: change(lines, lambda line: is_commit(line, "host-1", 2), state_sha256="sha-x"),
    ),
    "a restored state that nobody committed": (
        Invariant.RESTORED_BYTES,
        lambda lines: change(lines, lambda line: isinstance(line, RestoreEntry), state_sha256="sha-x"),
    ),
    "a step left out by a process": (
        Invariant.STEPS,
        lambda lines: (
            [line for line in lines if not is_commit(line, "host-0", 2)] + [commit("host-0", 5, 2, owners={})]
        ),
    ),
    "a step twice by a process": (Invariant.STEPS, lambda lines: [*lines, commit("host-0", 3, 2)]),
    "hosts that disagree about who computed what": (
        Invariant.MICROBATCHES,
        lambda lines: change(
            lines,
            lambda line: is_commit(line, "host-1", 2),
            owners={"train": ("host-1", "host-1", "host-0")},
        ),
    ),
    "a microbatch too few": (
        Invariant.MICROBATCHES,
        lambda lines: change(
            lines,
            lambda line: isinstance(line, StepEntry) and line.step == 3,
            owners={"train": ("host-0", "host-1")},
        ),
    ),
    "a step of which nobody says who computed it": (
        Invariant.MICROBATCHES,
        lambda lines: change(lines, lambda line: isinstance(line, StepEntry) and line.step == 3, owners={}),
    ),
    "a microbatch that nobody computed": (
        Invariant.MICROBATCHES,
        lambda lines: [
            line
            for line in lines
            if not (
                isinstance(line, MicrobatchEntry) and (line.host, line.step, line.index) == ("host-0", 1, 2)
            )
        ],
    ),
    "a zombie that trains on beside the others": (
        Invariant.FENCING,
        lambda lines: [
            *lines,
            MicrobatchEntry(host="host-1", pid=9, generation=1, step=3, index=1),
            commit("host-1", 3, 1, pid=9, monotonic_s=999.0),
        ],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_defect_of_a_ledger_violates_its_invariant(case: str) -> None:
    invariant, damage = BROKEN[case]
    found = check_commits(damage(good_lines()), REFERENCE)
    assert {violation.invariant for violation in found} == {invariant}, found


def test_a_zombie_may_commit_its_step_in_flight() -> None:
    lines = [*good_lines(), commit("host-1", 2, 1, pid=9, monotonic_s=999.0)]
    assert check_commits(lines, REFERENCE) == []


def test_missing_extra_and_unreferenced_steps_are_found() -> None:
    lines = [line for line in good_lines() if not (isinstance(line, StepEntry) and line.step == 3)]
    assert [v.invariant for v in check_completeness(lines, 4, REFERENCE)] == [Invariant.STEPS]
    assert [v.invariant for v in check_completeness(good_lines(), 3, REFERENCE)] == [Invariant.STEPS]
    assert [v.invariant for v in check_completeness(good_lines(), 4, {})] == [Invariant.BITS]


def test_a_step_may_have_an_accumulation_that_other_steps_lack() -> None:
    """An example is an evaluation every few steps."""
    owners = {**OWNERS, "evaluate": ("host-0", "host-1")}
    lines = change(good_lines(), lambda line: isinstance(line, StepEntry) and line.step == 2, owners=owners)
    undisturbed = [
        commit("localhost", step, owners=owners if step == 2 else OWNERS, num_hosts=1) for step in range(4)
    ]
    assert check_commits(lines, read_reference(undisturbed)) == []
    assert {v.invariant for v in check_commits(good_lines(), read_reference(undisturbed))} == {
        Invariant.MICROBATCHES
    }


def part(
    host: str, number: int, step: int = 0, generation: int = 1, replica: tuple[int, ...] = ()
) -> StepEntry:
    """Return the commit of one host's part of a sharded state, or of its replica's."""
    digest = f"{number:016x}{number:016x}"
    line = commit(host, step, generation, state_sha256="", additive_digest=digest, owners={})
    return msgspec.structs.replace(line, replica=replica)


def wholes(steps: int) -> dict[int, ReferenceStep]:
    """Return reference steps in which the parts 3 and 4 sum to the digest."""
    digest = StateDigest("sha-0", combine_sums([f"{3:016x}{3:016x}", f"{4:016x}{4:016x}"]))
    return {step: ReferenceStep(digest=digest, microbatches={}) for step in range(steps)}


def test_the_parts_of_a_sharded_state_are_summed_and_compared() -> None:
    assert check_commits([part("host-0", 3), part("host-1", 4)], wholes(1)) == []
    assert check_commits([part("host-0", 3)], wholes(1)) == [], "a part alone says nothing"
    found = check_commits([part("host-0", 3), part("host-1", 5)], wholes(1))
    assert [violation.invariant for violation in found] == [Invariant.BITS]


def test_the_parts_of_each_replica_are_summed_and_compared() -> None:
    first = [part("host-0", 3, replica=(0, 1)), part("host-1", 4, replica=(0, 1))]
    second = [part("host-2", 4, replica=(2, 3)), part("host-3", 3, replica=(2, 3))]
    left_over = part("host-4", 0)
    assert check_commits([*first, *second, left_over], wholes(1)) == []
    assert check_completeness([*first, *second[:1]], 1, wholes(1)) == [], "one replica has the whole state"
    other = [part("host-2", 4, replica=(2, 3)), part("host-3", 5, replica=(2, 3))]
    for reference in (wholes(1), {}):
        found = check_commits([*first, *other], reference)
        assert [violation.invariant for violation in found] == [Invariant.BITS]


def test_the_run_without_faults_may_be_that_of_the_hosts_of_one_replica() -> None:
    parts = [part(host, number, step) for step in range(2) for host, number in (("host-0", 3), ("host-1", 4))]
    assert {step: known.digest.sum for step, known in read_reference(parts).items()} == {
        step: known.digest.sum for step, known in wholes(2).items()
    }


def test_a_job_whose_bits_depend_on_its_hosts_has_no_run_to_compare_with() -> None:
    lines = [part("host-0", 3), part("host-1", 4)]
    assert check_completeness(lines, 1, None) == []
    assert [v.invariant for v in check_completeness(lines[:1], 1, None)] == [Invariant.BITS], "never compared"


def test_a_step_with_a_part_that_was_never_committed_is_incomplete() -> None:
    silent = [part("host-0", 7, step) for step in range(3)]
    assert check_commits(silent, wholes(3)) == [], "there is nothing to compare"
    assert [v.invariant for v in check_completeness(silent, 3, wholes(3))] == [Invariant.BITS]


def test_a_step_in_which_a_host_died_is_compared_where_it_is_repeated_or_restored() -> None:
    both = [part("host-0", 3), part("host-1", 4)]
    torn = [*both, part("host-0", 3, 1)]
    again = [part("host-0", 3, 1, generation=2), part("host-1", 4, 1, generation=2)]
    assert check_completeness([*torn, *again], 2, wholes(2)) == []
    restored: list[LedgerEntry] = [
        RestoreEntry(
            host=line.host,
            pid=7,
            generation=2,
            num_steps=2,
            num_hosts=2,
            replica=(),
            monotonic_s=200.0,
            state_sha256="",
            additive_digest=line.additive_digest,
        )
        for line in both
    ]
    assert check_completeness([*torn, *restored], 2, wholes(2)) == []


def test_the_step_in_flight_of_a_failed_job_may_be_incomplete() -> None:
    lines = [part("host-0", 3), part("host-1", 4), part("host-0", 3, 1)]
    assert check_completeness(lines, None, wholes(2)) == []
    assert [v.invariant for v in check_completeness(lines[:1] + lines[2:], None, wholes(2))] == [
        Invariant.BITS
    ]


def decided(number: int, phase: str, token: int, revision: int, host: str = "host-0") -> Event:
    return Event(
        kind=EventKind.GENERATION_PHASE,
        host=host,
        monotonic_s=float(revision),
        wall_s=0.0,
        generation=number,
        detail={"phase": phase, "token": token, "revision": revision, "reason": "why"},
    )


GOOD_DECISIONS = (
    decided(1, "form", 10, 11),
    decided(1, "active", 10, 12),
    decided(2, "quiesce", 20, 21, "host-1"),
    decided(2, "form", 20, 22, "host-1"),
)


def test_valid_decisions_violate_nothing_in_any_order_of_their_events() -> None:
    assert check_membership(GOOD_DECISIONS) == []
    assert check_membership(GOOD_DECISIONS[::-1]) == []


@pytest.mark.parametrize(
    ("bad", "invariant"),
    [
        (decided(2, "active", 10, 23), Invariant.SINGLE_LEADER),
        (decided(1, "form", 20, 23, "host-1"), Invariant.GENERATION_NUMBERS),
        (decided(2, "quiesce", 20, 23, "host-1"), Invariant.GENERATION_NUMBERS),
        (decided(2, "form", 20, 23, "host-1"), Invariant.GENERATION_NUMBERS),
    ],
)
def test_each_invalid_decision_violates_its_invariant(bad: Event, invariant: Invariant) -> None:
    assert [v.invariant for v in check_membership([*GOOD_DECISIONS, bad])] == [invariant]


def test_an_active_generation_may_be_rewritten_but_no_planned_change_becomes_unplanned() -> None:
    again = [*GOOD_DECISIONS, decided(2, "active", 20, 23, "host-1"), decided(2, "active", 20, 24, "host-1")]
    assert check_membership(again) == []
    changed = [*again, decided(3, "pause", 20, 25, "host-1"), decided(3, "quiesce", 20, 26, "host-1")]
    assert [v.invariant for v in check_membership(changed)] == [Invariant.GENERATION_NUMBERS]


def test_a_fencing_token_of_two_leaders_is_found() -> None:
    events = [
        Event(kind=EventKind.LEADER_ELECTED, host=host, monotonic_s=0.0, wall_s=0.0, detail={"token": 5})
        for host in HOSTS
    ]
    assert [v.invariant for v in check_membership(events)] == [Invariant.SINGLE_LEADER]


def test_a_change_of_generation_without_a_reason_is_found() -> None:
    event = decided(2, "quiesce", 20, 21)
    silent = msgspec.structs.replace(event, detail={**event.detail, "reason": ""})
    assert [v.invariant for v in check_membership([silent])] == [Invariant.EVENTS]


KILL = ProcessKill()


def killed(
    part: TargetPart,
    fault: ProcessKill | ProcessStop | SlowProcess | SlowInput | BitFlip = KILL,
    needs: tuple[str, ...] = (),
) -> IncidentRecord:
    incident = Incident(
        trigger=Trigger(step=1), target=FaultTarget(part=part), fault=fault, required_events=needs
    )
    return IncidentRecord(index=0, incident=incident, hosts=("host-1",), started_s=50.0)


def happened(kind: EventKind, host: str = "host-1", at_s: float = 51.0, **detail: str) -> Event:
    return Event(kind=kind, host=host, monotonic_s=at_s, wall_s=0.0, detail=dict(detail))


def test_a_fault_without_an_expected_event_is_found() -> None:
    done = killed(TargetPart.WORKER)
    told = functools.partial(check_expected_events, [done], lease_ttl_s=2.0)
    assert told([happened(EventKind.WORKER_EXITED)]) == []
    assert len(told([])) == 1
    assert len(told([happened(EventKind.WORKER_EXITED, "host-0")])) == 1, "it is of another host"
    assert len(told([happened(EventKind.WORKER_EXITED, at_s=49.0)])) == 1, "it was before"
    assert check_expected_events([dataclasses.replace(done, skip_reason="why")], [], 2.0) == []
    lost = [happened(EventKind.HOST_LOST, "host-0", lost="host-1")]
    assert check_expected_events([killed(TargetPart.HOST)], lost, 2.0) == []


def test_a_finding_that_no_fault_explains_is_a_violation() -> None:
    hang, out = happened(EventKind.HANG_NAMED), happened(EventKind.HOST_QUARANTINED)
    assert len(check_findings([], [hang, out])) == 2
    kill = killed(TargetPart.WORKER)
    assert [v.description.partition(" ")[0] for v in check_findings([kill], [hang, out])] == ["hang.named"]
    stopped = killed(TargetPart.WORKER, ProcessStop(duration_s=3.0))
    assert check_findings([stopped], [hang, out]) == []
    assert len(check_findings([stopped], [happened(EventKind.HANG_NAMED, at_s=49.0)])) == 1, "it was before"


def test_only_a_host_that_was_made_slow_may_be_found_slow() -> None:
    slowed = killed(TargetPart.WORKER, SlowProcess(share=0.3, duration_s=3.0))
    assert slowed.hosts == ("host-1",)
    named, another = (
        happened(EventKind.HOST_SLOW, "host-0", slow=host, part="compute") for host in ("host-1", "host-2")
    )
    assert check_findings([slowed], [named]) == []
    assert len(check_findings([slowed], [another])) == 1
    assert len(check_findings([killed(TargetPart.WORKER)], [named])) == 1


def test_only_the_input_of_a_host_whose_input_was_made_slow_may_be_found_slow() -> None:
    slowed = killed(TargetPart.WORKER, SlowInput(delay_s=0.1, duration_s=3.0))
    parts = {part: happened(EventKind.HOST_SLOW, "host-0", slow="host-1", part=part) for part in FindingKind}
    found = {part for part, event in parts.items() if check_findings([slowed], [event])}
    assert found == set(FindingKind) - {FindingKind.INPUT}


def test_a_short_stop_needs_no_event() -> None:
    assert check_expected_events([killed(TargetPart.WORKER, ProcessStop(duration_s=0.3))], [], 2.0) == []
    assert len(check_expected_events([killed(TargetPart.WORKER, ProcessStop(duration_s=3.0))], [], 2.0)) == 1
    assert check_expected_events([killed(TargetPart.AGENT, ProcessStop(duration_s=3.0))], [], 2.0) == []
    assert len(check_expected_events([killed(TargetPart.AGENT, ProcessStop(duration_s=6.0))], [], 2.0)) == 1


def test_the_receiver_must_report_flipped_bits_of_a_message() -> None:
    told = functools.partial(
        check_expected_events, [killed(TargetPart.SNAPSHOTS, BitFlip(region="message"))], lease_ttl_s=2.0
    )
    failed = functools.partial(happened, EventKind.SNAPSHOT_PEER_FAILED, "host-0", peer="host-1")
    assert told([failed(error="ChecksumMismatch: block 1 of host-1's part arrived corrupt")]) == []
    assert told([happened(EventKind.SNAPSHOT_BLOCK_CORRUPT, "host-0", source="host-1")]) == []
    assert len(told([failed(error="PeerUnreachable: broke off a read")])) == 1
    assert len(told([happened(EventKind.SNAPSHOT_BLOCK_CORRUPT, "host-1", source="host-0")])) == 1
    assert len(told([happened(EventKind.HOST_LOST, "host-0", lost="host-1")])) == 1


def test_an_event_that_the_manifest_requires_must_follow() -> None:
    done = killed(TargetPart.SNAPSHOTS, BitFlip(), needs=("snapshot.block_corrupt",))
    assert len(check_expected_events([done], [], 2.0)) == 1
    assert check_expected_events([done], [happened(EventKind.SNAPSHOT_BLOCK_CORRUPT, "host-0")], 2.0) == []


def test_an_event_that_an_incident_forbids_may_come_only_after_the_next_one() -> None:
    incident = Incident(
        trigger=Trigger(step=1),
        target=FaultTarget(part=TargetPart.STORE_MEMBER),
        fault=KILL,
        forbidden_events=("world.formed",),
    )
    first = IncidentRecord(index=0, incident=incident, hosts=("member-0",), started_s=50.0)
    following = dataclasses.replace(killed(TargetPart.WORKER), index=1, started_s=60.0)
    exited = happened(EventKind.WORKER_EXITED, at_s=61.0)

    def count(at_s: float, *others: IncidentRecord) -> int:
        events = [happened(EventKind.WORLD_FORMED, at_s=at_s), exited]
        return len(check_expected_events([first, *others], events, 2.0))

    assert [count(at_s, following) for at_s in (49.0, 51.0, 61.0)] == [0, 1, 0]
    assert count(61.0) == 1
    assert count(61.0, dataclasses.replace(following, skip_reason="why", started_s=0.0)) == 1


def test_growth_is_counted_from_the_tenth_sample_of_each_process() -> None:
    def samples(process: int, sizes: list[int]) -> list[ProcessSample]:
        name = f"process {process}"
        return [
            ProcessSample(name=name, pid=process, start_ticks=1, rss_bytes=size * MIB, descriptors=size)
            for size in sizes
        ]

    warm = [50] * (SETTLING_INCIDENTS - 1)
    grown = samples(1, [*warm, 60, 61, 64]) + samples(2, [*warm, 60, 60]) + samples(3, [1, 99])
    one = "process 1"
    assert measure_growth(grown) == ResourceGrowth(
        rss_mib=4.0, rss_process=one, late_rss_mib=3.0, descriptors=4, descriptors_process=one, processes=2
    )
    assert measure_growth(samples(3, [1, 99])) == ResourceGrowth()
    busy = measure_growth(samples(4, [*warm, *[60, 69] * 5, *[61, 90] * 5]))
    assert (busy.rss_mib, busy.descriptors) == (1.0, 1), "what passes does not count"
    full = measure_growth(samples(5, [*warm, *range(60, 70), *[70] * 12]))
    assert (full.rss_mib, full.late_rss_mib) == (10.0, 0.0), "what is full grows no more"
    later = ProcessSample(name=one, pid=1, start_ticks=2, rss_bytes=MIB, descriptors=1)
    assert measure_growth([*samples(1, [*warm, 60]), later]).processes == 0


def test_a_timeline_is_in_order_of_time() -> None:
    events = [
        happened(EventKind.HOST_LOST, at_s=3.0, lost="host-2"),
        happened(EventKind.WORKER_EXITED, at_s=1.0),
    ]
    story = format_timeline(events, [(2.0, "SIGKILL to [5]")])
    assert story == [
        "1.000 host-1 worker.exited",
        "2.000 campaign: SIGKILL to [5]",
        "3.000 host-1 host.lost lost=host-2",
    ]
