"""Audits: what is drawn, what a mismatch shows, and how far a host is verified."""

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import ComputationsDiffer, PeerUnreachable
from resilient_jax.events import EventKind
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.state.state_digest import DIGEST_WORDS
from resilient_jax.step import auditor
from resilient_jax.step.assignment import (
    AccumulationSpec,
    ReplicaShape,
    assign_microbatches,
    locate_replicas,
)
from resilient_jax.step.audit import AuditEvidence, Party, draw_audits, list_audited_hosts, settle
from resilient_jax.step.audit_run import AuditFinding, OwnResults, digest_result, run_audits
from resilient_jax.step.microbatch_accumulator import flip_bit
from resilient_jax.worker.audit_record import AuditKnowledge, AuditRecord
from resilient_jax.worker.audit_response import AuditResponse
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.training_control import CorruptionFound
from tests.support.summing_hosts import SummingHosts


def assign(num_hosts, num_microbatches, per_host=1, claims=None):
    locations = locate_replicas(range(num_hosts), ReplicaShape(per_host=per_host), [per_host] * num_hosts)
    claims = np.zeros((num_hosts, num_microbatches), bool) if claims is None else claims
    return assign_microbatches(locations, claims, np.ones(num_hosts))


def spec_of(step, num_microbatches):
    return AccumulationSpec(name="train", step=step, num_microbatches=num_microbatches, reduction="exact")


@given(
    num_hosts=st.integers(1, 6),
    num_microbatches=st.integers(1, 40),
    per_host=st.integers(1, 3),
    step=st.integers(0, 1000),
    share=st.floats(0, 1),
)
def test_owner_auditor_and_referee_are_on_different_hosts(num_hosts, num_microbatches, per_host, step, share):
    assignment = assign(num_hosts, num_microbatches, per_host)
    spec = spec_of(step, num_microbatches)
    audits = draw_audits(spec, assignment, share)
    assert audits == draw_audits(spec, assignment, share)
    host_of = [location.host_indexes[0] for location in assignment.locations]
    for audit in audits:
        assert audit.microbatch in assignment.by_replica[audit.owner]
        parties = [audit.owner, audit.auditor, *([] if audit.referee is None else [audit.referee])]
        assert len({host_of[replica] for replica in parties}) == len(parties)
        assert (audit.referee is None) == (num_hosts == 2)
    assert len({audit.microbatch for audit in audits}) == len(audits)
    # No replica has more to do than any other, but where an owner had too few microbatches.
    work = collections.Counter(audit.auditor for audit in audits)
    assert max(work.values(), default=0) <= -(-share * num_microbatches // len(host_of)) + 1


def test_the_share_of_audits_and_what_steps_take_longer_is_the_one_that_was_asked_for():
    num_steps, share, assignment = 4000, 0.01, assign(4, 32)
    drawn = [draw_audits(spec_of(step, 32), assignment, share) for step in range(num_steps)]
    assert sum(map(len, drawn)) / (32 * num_steps) == pytest.approx(share, rel=0.15)
    # A replica computes 8 microbatches in a step, and one more in a step with audits.
    longer = sum(max(collections.Counter(a.auditor for a in audits).values()) for audits in drawn if audits)
    assert longer / (8 * num_steps) == pytest.approx(share, rel=0.15)
    pairs = {(audit.owner, audit.auditor) for audits in drawn for audit in audits}
    assert pairs == set(itertools.permutations(range(4), 2)), "each comes to audit each other"


def test_what_a_host_has_from_before_a_failure_is_not_audited():
    claims = np.zeros((3, 9), bool)
    claims[0, :6] = True
    audits = draw_audits(spec_of(0, 9), assign(3, 9, claims=claims), 1.0)
    assert {audit.microbatch for audit in audits} <= {6, 7, 8}


def test_replicas_that_span_hosts_are_not_audited():
    locations = locate_replicas(range(4), ReplicaShape(hosts=2), [1] * 4)
    assignment = assign_microbatches(locations, np.zeros((4, 8), bool), np.ones(4))
    assert draw_audits(spec_of(0, 8), assignment, 1.0) == ()


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    step=st.integers(0, 1000),
    share=st.floats(0, 1),
)
def test_of_hosts_with_other_numbers_of_replicas_each_replica_audits_another_host(counts, step, share):
    locations = locate_replicas(range(len(counts)), ReplicaShape(per_host="devices"), counts)
    size = 8 * len(locations)
    assignment = assign_microbatches(locations, np.zeros((len(counts), size), bool), np.array(counts, float))
    audits = draw_audits(spec_of(step, size), assignment, share)
    for audit in audits:
        parties = [audit.owner, audit.auditor, *([] if audit.referee is None else [audit.referee])]
        assert len({locations[replica].host_indexes for replica in parties}) == len(parties)
        assert audit.microbatch in assignment.by_replica[audit.owner]
    assert len({audit.microbatch for audit in audits}) == len(audits)
    if audits:
        assert {audit.auditor for audit in audits} == set(range(len(locations)))
        assert {audit.owner for audit in audits} == set(range(len(locations)))


def test_replicas_of_other_sizes_are_not_compared():
    locations = locate_replicas(range(3), ReplicaShape(), [4, 2, 4])
    assignment = assign_microbatches(locations, np.zeros((3, 10), bool), np.array([4.0, 2.0, 4.0]))
    audits = draw_audits(spec_of(0, 10), assignment, 1.0)
    assert {(audit.owner, audit.auditor, audit.referee) for audit in audits} == {(0, 2, None), (2, 0, None)}


def test_hosts_with_other_axes_are_not_compared():
    axes = ((2, (("tensor", 1),)), (3, (("tensor", 3),)), (4, (("tensor", 1),)))
    locations = locate_replicas(range(3), ReplicaShape(per_host="devices", axes_by_devices=axes), [2, 3, 4])
    assignment = assign_microbatches(locations, np.zeros((3, 24), bool), np.array([2.0, 3.0, 4.0]))
    audits = draw_audits(spec_of(0, 24), assignment, 1.0)
    assert audits
    assert {locations[audit.owner].host_indexes for audit in audits} == {(0,), (2,)}


SOUND, WRONG, OTHER = (1, 2), (3, 4), (5, 6)


@pytest.mark.parametrize(
    ("evidence", "party"),
    [
        ((WRONG, SOUND, WRONG, SOUND, SOUND), Party.OWNER),
        ((WRONG, SOUND, SOUND, SOUND, SOUND), Party.OWNER),
        ((SOUND, WRONG, SOUND, WRONG, SOUND), Party.AUDITOR),
        ((SOUND, WRONG, SOUND, OTHER, SOUND), Party.AUDITOR),
        ((WRONG, SOUND, WRONG, OTHER, SOUND), None),
        ((WRONG, SOUND, WRONG, SOUND, OTHER), None),
        ((WRONG, SOUND, SOUND, SOUND, None), None),
        ((WRONG, SOUND, WRONG, SOUND, None), None),
    ],
    ids=[
        "owner",
        "owner once",
        "auditor",
        "auditor never twice",
        "both",
        "referee",
        "two hosts, once",
        "two hosts",
    ],
)
def test_a_host_is_wrong_if_another_had_the_same_bits_twice_and_a_third_has_them(evidence, party):
    names = ("owner", "auditor", "owner_again", "auditor_again", "referee")
    assert settle(AuditEvidence(**dict(zip(names, evidence, strict=True))))[0] is party


@given(
    num_hosts=st.integers(3, 6),
    corrupt=st.integers(0, 5),
    errs=st.sampled_from(["always", "once", "random"]),
    step=st.integers(0, 50),
)
def test_a_single_corrupt_host_is_always_the_one_that_is_named(num_hosts, corrupt, errs, step):
    corrupt %= num_hosts
    assignment = assign(num_hosts, 3 * num_hosts)
    audits = draw_audits(spec_of(step, 3 * num_hosts), assignment, 0.5)
    results = iter(range(1, 10**6))

    def compute(replica, index):
        first = (replica, index) not in computed
        computed.add((replica, index))
        if replica != corrupt or (errs == "once" and not first):
            return (0, index + 1)
        return (7, index) if errs != "random" else (next(results), index)

    computed = set()
    own = {
        replica: {index: compute(replica, index) for index in indexes}
        for replica, indexes in enumerate(assignment.by_replica)
    }
    findings = run_on_all_hosts(audits, assignment, own, compute, num_hosts)
    wrong = [audit for audit in audits if corrupt in (audit.owner, audit.auditor)]
    assert {finding.corrupt for finding in findings} <= {corrupt}, "never another one"
    if errs == "always" and wrong:
        assert {finding.corrupt for finding in findings} == {corrupt}
        assert len(findings) == len(wrong)


def run_on_all_hosts(audits, assignment, own, compute, num_hosts):
    """Return what `run_audits` finds: each exchange is made by calling it once for each host."""
    tables: list[list[np.ndarray]] = []

    class NextExchange(Exception):
        pass

    def run(host, record):
        done = iter(range(len(tables)))

        def add_up(table) -> Any:
            position = next(done, None)
            if position is None:
                record.append(table)
                raise NextExchange
            return tables[position]

        cached = caches[host]

        def compute_once(replica, index):
            place = next(counts[host])
            if place not in cached:
                cached[place] = compute(replica, index)
            return cached[place]

        counts[host] = itertools.count()
        results = OwnResults(own[host], frozenset({host}), compute_once, lambda: None)
        return run_audits(audits, assignment, results, add_up)

    caches: list[dict] = [{} for _ in range(num_hosts)]
    counts: list = [itertools.count() for _ in range(num_hosts)]
    while True:
        record: list[np.ndarray] = []
        found = None
        for host in range(num_hosts):
            try:
                found = run(host, record)
            except NextExchange:
                continue
        if not record:
            assert found is not None
            return found
        tables.append(np.sum(record, axis=0))


def test_one_flipped_bit_changes_the_digest_of_a_result():
    found = {"w": jnp.linspace(-1.0, 1.0, 5000).reshape(50, 100), "loss": jnp.float32(1.5)}
    flipped = flip_bit(found)
    assert digest_result(found) != digest_result(flipped)
    assert int((np.asarray(found["w"]) != np.asarray(flipped["w"])).sum()) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(flipped))


A, B, C = HostName("a"), HostName("b"), HostName("c")


def begin(records, generation, hosts, step):
    """Begin a generation on all of its hosts, which exchange what they know."""
    knowledge = [records[host].describe(host) for host in hosts]
    last = max(range(len(hosts)), key=lambda index: knowledge[index].generation)
    newest = records[hosts[last]].list_steps(hosts)
    for host in hosts:
        records[host].take_over(GenerationNumber(generation), hosts, step, knowledge, newest)


def make_records(hosts=(A, B, C)):
    return {host: AuditRecord() for host in hosts}


def test_a_host_is_verified_up_to_its_last_audit_and_a_new_one_from_where_it_joined():
    records = make_records()
    begin(records, 1, [A, B], 10)
    assert records[A].list_steps([A, B]) == (10, 10), "what all begin with counts as verified"
    for host in (A, B):
        records[host].pass_audit([A, B], 20)
    begin(records, 2, [A, C], 30)
    for host in (A, C):
        assert records[host].list_steps([A, C]) == (21, 30)
    begin(records, 3, [A, B, C], 40)
    for host in (A, B, C):
        assert records[host].list_steps([A, B, C]) == (21, 21, 30), "B was away, and is as doubtful as before"
    begin(records, 4, [A, B, C], 25)
    assert records[C].list_steps([A, B, C]) == (21, 21, 25), "what is done again is verified again"


def test_a_host_that_was_away_takes_over_what_the_others_know():
    records = make_records()
    begin(records, 1, [A, B], 0)
    for host in (A, B):
        records[host].pass_audit([A, B], 50)
    # While A is away the job goes back, and C joins.
    begin(records, 2, [B, C], 20)
    begin(records, 3, [A, B, C], 60)
    for host in (A, B, C):
        assert records[host].list_steps([A, B, C]) == (20, 20, 20), "not 51 of A, and 60 of C"


def test_a_worker_that_is_started_again_knows_what_the_others_know():
    records = make_records()
    begin(records, 1, [A, B, C], 0)
    for record in records.values():
        record.pass_audit([A, B, C], 9)
    records[A] = AuditRecord()
    begin(records, 2, [A, B, C], 30)
    assert records[A].list_steps([A, B, C]) == (10, 10, 10)
    for host in (A, B, C):
        records[host] = AuditRecord()
    begin(records, 3, [A, B, C], 30)
    assert records[A].list_steps([A, B, C]) == (30, 30, 30), "nobody knows: all began again"


class Control(StandaloneControl):
    def __init__(self):
        super().__init__("a")
        self.events = []

    def record_event(self, kind, **detail):
        self.events.append((kind, detail))
        return super().record_event(kind, **detail)


def make_finding(corrupt, referee: int | None = 2, *, is_reproducible=True):
    return AuditFinding(
        microbatch=3,
        owner=1,
        auditor=0,
        referee=referee,
        corrupt=corrupt,
        is_reproducible=is_reproducible,
        why="because",
    )


def make_response(verified, control=None):
    """Return what host a makes of findings, where the hosts are verified up to these steps."""
    hosts = [A, B, C][: len(verified)]
    record = AuditRecord()
    record.take_over(
        GenerationNumber(2), hosts, 100, [AuditKnowledge(1, steps) for steps in verified], verified
    )
    return AuditResponse(GenerationNumber(2), hosts, A, control or Control(), record)


def test_all_hosts_take_over_the_record_of_one_that_has_trained_last():
    records = make_records()
    begin(records, 1, [A, B], 0)
    for host in (A, B):
        records[host].pass_audit([A, B], 50)
    begin(records, 2, [B, C], 20)  # while A is away the job goes back
    hosts = [A, B, C]
    responses = [AuditResponse(GenerationNumber(3), hosts, host, Control(), records[host]) for host in hosts]
    SummingHosts(3).run(lambda exchange: responses[exchange.host_index].begin(60, exchange))
    assert [response.list_verified_steps() for response in responses] == [(20, 20, 20)] * 3


def test_states_from_after_the_last_audit_of_a_corrupt_host_are_in_doubt():
    control = Control()
    response = make_response([9, 5, 9], control)
    with pytest.raises(
        CorruptionFound, match=r"b computes wrongly.*more than 5 steps are in doubt"
    ) as raised:
        response.fail_audit([make_finding(1)], step=12)
    assert (raised.value.failure.doubt.trusted_step, raised.value.is_this_host) == (5, False)
    ((kind, detail),) = control.events
    assert (kind, detail["corrupt"], detail["compared"]) == (EventKind.AUDIT_FAILED, "b", "b, a, c")


def test_if_no_state_is_in_doubt_the_other_hosts_go_on_with_the_step():
    make_response([12, 12, 12]).fail_audit([make_finding(1)], step=12)


def test_of_two_hosts_neither_is_named_and_the_job_stops():
    with pytest.raises(
        ComputationsDiffer, match=r"different results of microbatch 3 on b and a.*than 4 steps"
    ):
        make_response([4, 6]).fail_audit([make_finding(None, None)], step=12)


@pytest.mark.parametrize(("verified", "referee"), [([0, 0, 0], 2), ([0, 0], None)], ids=["three", "two"])
def test_what_differs_from_run_to_run_is_reported_once_and_names_no_host(verified, referee, capsys):
    response = make_response(verified)
    for step in (3, 4):
        response.fail_audit([make_finding(None, referee, is_reproducible=False)], step=step)
    assert capsys.readouterr().err.count("audit of step") == 1


def test_list_audited_hosts_are_those_that_also_audit():
    assignment = assign(3, 2)  # the third host has nothing to be audited
    audits = draw_audits(spec_of(0, 2), assignment, 1.0)
    assert set(list_audited_hosts(audits, assignment)) <= {0, 1}


def test_a_host_is_audited_if_each_of_its_replicas_is():
    locations = locate_replicas([ProcessIndex(0), ProcessIndex(1)], ReplicaShape(per_host="devices"), [2, 2])
    claims = np.zeros((2, 8), bool)
    audits = draw_audits(spec_of(0, 8), assignment := assign_microbatches(locations, claims, np.ones(2)), 1.0)
    assert list_audited_hosts(audits, assignment) == [0, 1]
    of_first = [audit for audit in audits if audit.owner % 2 == 0]
    assert list_audited_hosts(of_first, assignment) == []


def test_with_a_share_of_1_each_microbatch_is_audited_whoever_has_how_many():
    locations = locate_replicas([ProcessIndex(0), ProcessIndex(1)], ReplicaShape(), [1, 1])
    claims = np.zeros((2, 8), bool)
    assignment = assign_microbatches(locations, claims, np.array([3.0, 1.0]))
    audits = draw_audits(spec_of(0, 8), assignment, 1.0)
    assert sorted(audit.microbatch for audit in audits) == list(range(8))


@pytest.mark.parametrize("word", range(DIGEST_WORDS))
def test_an_audit_that_differs_in_one_word_voids_the_sums_before_more_is_computed(word):
    assignment = assign(3, 3)
    audits = draw_audits(spec_of(0, 3), assignment, 1.0)
    seen = []

    def add_up(table):
        if seen:
            raise PeerUnreachable("a host died")
        table = table.copy()
        table[0, word] += 1  # of one of the two hosts
        return table

    with pytest.raises(PeerUnreachable):
        run_audits(
            audits,
            assignment,
            OwnResults(
                digests={index: (0,) * DIGEST_WORDS for index in range(3)},
                replicas=frozenset({0, 1, 2}),
                compute=lambda replica, index: (0,) * DIGEST_WORDS,
                doubt=lambda: seen.append("doubt"),
            ),
            add_up,
        )
    assert seen == ["doubt"]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_no_host_acts_on_a_finding_before_all_know_it_and_each_acts_though_the_others_have_begun_to(
    monkeypatch, is_interrupted
):
    """Else the host that computes wrongly is unwound by the others before it knows, and stays in the job."""
    control = Control()
    done = []

    def all_reduce(vector):
        done.append(("all know", len(control.events)))
        if is_interrupted:
            raise RuntimeError("connection closed by peer")
        return vector

    monkeypatch.setattr(auditor, "run_audits", lambda *_: [make_finding(0)])
    own = OwnResults(digests={}, replicas=frozenset(), compute=lambda *_: (), doubt=lambda: None)
    watched = auditor.Auditor(1.0, make_response([12, 12, 4], control))
    with pytest.raises(CorruptionFound, match="more than 12 steps") as found:
        watched.run((), spec_of(20, 4), assign(3, 4), own, CollectiveExchange(0, 3, all_reduce))
    assert found.value.is_this_host
    assert done == [("all know", 0)]
