"""The store's core against a naive model, for any order of requests, expiries and compactions."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from resilient_jax.errors import CallerError, CompactedRevision, LeaseExpired
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.interface import (
    NO_LEASE,
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteEvent,
    DeleteOp,
    PutEvent,
    PutOp,
    RangeOp,
    RangeResponse,
)
from resilient_jax.store.state_machine import StoreStateMachine

KEYS = st.sampled_from(["a", "a/1", "a/2", "ab", "b", "ö"])
PREFIXES = st.sampled_from(["", "a", "a/", "b", "z"])
VALUES = st.sampled_from([b"", b"1", b"2"])
KEEP_REVISIONS = 6
TTL_S = 10.0


@dataclasses.dataclass(frozen=True)
class Entry:
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


class StoreModel(RuleBasedStateMachine):
    """A model that stores every past state in full: slow, but too simple to share a bug."""

    leases = Bundle("leases")

    @initialize()
    def start(self):
        self.machine = StoreStateMachine(first_lease=LeaseId(100), keep_revisions=KEEP_REVISIONS)
        self.now_s = 0.0
        self.states: dict[int, dict[str, Entry]] = {1: {}}
        self.deadlines: dict[int, float] = {}

    @property
    def revision(self):
        return max(self.states)

    @property
    def current(self):
        return self.states[self.revision]

    def commit(self, after):
        if after != self.current:
            self.states[self.revision + 1] = after

    def written(self, before, key, value, lease):
        old, revision = before.get(key), self.revision + 1
        birth, version = (old.create_revision, old.version + 1) if old else (revision, 1)
        return {**before, key: Entry(value, birth, revision, version, lease)}

    def end_lease(self, lease):
        del self.deadlines[lease]
        self.commit({key: entry for key, entry in self.current.items() if entry.lease != lease})

    @rule(target=leases)
    def grant(self):
        lease = self.machine.grant(TTL_S, self.now_s)
        assert lease not in self.deadlines
        self.deadlines[lease] = self.now_s + TTL_S
        return lease

    @rule(key=KEYS, value=VALUES)
    def put(self, key, value):
        result = self.machine.transaction((), [PutOp(key, value)])
        self.commit(self.written(self.current, key, value, NO_LEASE))
        assert result.revision == self.revision

    @rule(key=KEYS, value=VALUES, lease=leases)
    def put_with_lease(self, key, value, lease):
        if lease in self.deadlines:
            self.machine.transaction((), [PutOp(key, value, lease)])
            self.commit(self.written(self.current, key, value, lease))
        else:
            with pytest.raises(LeaseExpired):
                self.machine.transaction((), [PutOp("b", b"never"), PutOp(f"{key}!", value, lease)])

    @rule(prefix=PREFIXES)
    def delete_prefix(self, prefix):
        self.machine.transaction((), [DeleteOp(prefix, is_prefix=True)])
        self.commit({key: entry for key, entry in self.current.items() if not key.startswith(prefix)})

    @rule(
        compared=KEYS,
        operator=st.sampled_from(CompareOperator),
        version=st.integers(0, 3),
        put_key=KEYS,
        deleted=KEYS,
        value=VALUES,
    )
    def transact(self, compared, operator, version, put_key, deleted, value):
        operations = [PutOp(put_key, value), DeleteOp(deleted), RangeOp("", is_prefix=True)]
        compare = Compare(compared, CompareTarget.VERSION, operator, version)
        if put_key == deleted:
            with pytest.raises(CallerError):
                self.machine.transaction([compare], operations)
            return
        result = self.machine.transaction([compare], operations, [DeleteOp(deleted)])
        found = self.current[compared].version if compared in self.current else 0
        holds = {
            CompareOperator.EQUAL: found == version,
            CompareOperator.NOT_EQUAL: found != version,
            CompareOperator.GREATER: found > version,
            CompareOperator.LESS: found < version,
        }[operator]
        after = {key: entry for key, entry in self.current.items() if key != deleted}
        if holds:
            after = self.written(after, put_key, value, NO_LEASE)
            seen = result.responses[2]
            assert isinstance(seen, RangeResponse)
            assert [entry.key for entry in seen.key_values] == sorted(after)
        self.commit(after)
        assert (result.succeeded, result.revision) == (holds, self.revision)

    @rule(lease=leases)
    def keep_alive(self, lease):
        if lease in self.deadlines:
            assert self.machine.keep_alive(lease, self.now_s) == TTL_S
            self.deadlines[lease] = self.now_s + TTL_S
        else:
            with pytest.raises(LeaseExpired):
                self.machine.keep_alive(lease, self.now_s)

    @rule(lease=consumes(leases))
    def revoke(self, lease):
        if lease in self.deadlines:
            self.machine.revoke(lease)
            self.end_lease(lease)
        else:
            with pytest.raises(LeaseExpired):
                self.machine.revoke(lease)

    @rule(seconds=st.floats(0.1, 6.0))
    def pass_time(self, seconds):
        self.now_s += seconds
        due = sorted(
            (deadline, lease) for lease, deadline in self.deadlines.items() if deadline <= self.now_s
        )
        assert self.machine.expire(self.now_s) == [lease for _, lease in due]
        for _, lease in due:
            self.end_lease(lease)

    @rule(seconds=st.floats(0.1, 6.0))
    def sleep(self, seconds):
        """Suspend the store: time passes, and no lease comes nearer to its expiry."""
        self.now_s += seconds
        self.machine.extend_leases(seconds)
        self.deadlines = {lease: deadline + seconds for lease, deadline in self.deadlines.items()}

    @invariant()
    def keys_are_those_of_the_model(self):
        assert self.machine.revision == self.revision
        found = {
            entry.key: Entry(
                entry.value, entry.create_revision, entry.mod_revision, entry.version, entry.lease
            )
            for entry in self.machine.range("")
        }
        assert found == self.current
        assert list(found) == sorted(found)

    @invariant()
    def next_deadline_is_the_earliest(self):
        assert self.machine.next_deadline_s() == min(self.deadlines.values(), default=None)

    @invariant()
    def history_tells_exactly_the_differences(self):
        oldest = max(2, self.revision - KEEP_REVISIONS + 1)
        for from_revision in range(oldest, self.revision + 2):
            for prefix in ("", "a"):
                events, following = self.machine.history.read(
                    prefix, Revision(from_revision), 10**9, self.machine.revision
                )
                assert following == self.revision + 1
                expected = [
                    change
                    for revision in range(from_revision, self.revision + 1)
                    for change in self.differences(revision, prefix)
                ]
                assert sorted(map(summary, events)) == sorted(expected)
                assert [e.mod_revision for e in events] == sorted(e.mod_revision for e in events)
        with pytest.raises(CompactedRevision):
            self.machine.history.read("", Revision(oldest - 1), 10**9, self.machine.revision)

    def differences(self, revision, prefix):
        before, after = self.states[revision - 1], self.states[revision]
        for key in before.keys() | after.keys():
            if key.startswith(prefix) and before.get(key) != after.get(key):
                yield revision, key, "put" if key in after else "delete"


def summary(event):
    return event.mod_revision, event.key, "put" if isinstance(event, PutEvent) else "delete"


TestStoreMachineFollowsTheModel = StoreModel.TestCase
TestStoreMachineFollowsTheModel.settings = settings(stateful_step_count=40)


def put(machine, key, value=b""):
    return machine.transaction((), [PutOp(key, value)]).revision


def new_machine(**options):
    return StoreStateMachine(first_lease=LeaseId(1), **options)


def test_a_long_replay_arrives_in_batches_that_split_no_revision():
    machine = new_machine()
    start = machine.transaction((), [PutOp("a", b"x" * 100), PutOp("b", b"x" * 100)]).revision
    for _ in range(9):
        machine.transaction((), [PutOp("a", b"x" * 100), PutOp("b", b"x" * 100)])
    pieces, following = [], start
    while following <= machine.revision:
        events, following = machine.history.read("", following, 1000, machine.revision)
        pieces.append([event.mod_revision for event in events])
    assert len(pieces) > 1
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert [revision for piece in pieces for revision in piece] == [
        revision for revision in range(start, start + 10) for _ in "ab"
    ]


def test_history_is_bounded_in_bytes_for_any_values():
    machine = new_machine(keep_bytes=10_000)
    last = put(machine, "a")
    for _ in range(50):
        last = put(machine, "a", b"x" * 3000)
    events, _ = machine.history.read(
        "", Revision(machine.history.compacted_revision + 1), 10**9, machine.revision
    )
    assert 1 <= len(events) <= 3
    assert events[-1].mod_revision == last


def test_the_history_always_contains_the_last_change():
    machine = new_machine(keep_bytes=1)
    last = put(machine, "a", b"x" * 3000)
    assert len(machine.history.read("", last, 10**9, machine.revision)[0]) == 1


def test_leases_expire_in_the_order_of_their_deadlines():
    machine = new_machine()
    late, early = machine.grant(5.0, 0.0), machine.grant(3.0, 0.0)
    machine.transaction((), [PutOp("late", b"", late), PutOp("early", b"", early)])
    revision = machine.revision
    assert machine.expire(6.0) == [early, late]
    events, _ = machine.history.read("", Revision(revision + 1), 10**9, machine.revision)
    assert events == [
        DeleteEvent(key="early", mod_revision=Revision(revision + 1)),
        DeleteEvent(key="late", mod_revision=Revision(revision + 2)),
    ]


def test_a_lease_ends_exactly_at_its_deadline():
    machine = new_machine()
    lease = machine.grant(3.0, 1.0)
    assert machine.expire(3.999) == []
    assert machine.expire(4.0) == [lease]


@pytest.mark.parametrize(
    ("target", "value"),
    [(CompareTarget.VALUE, 1), (CompareTarget.VERSION, b"1"), (CompareTarget.MOD_REVISION, b"")],
)
def test_a_compare_with_the_wrong_type_is_refused(target, value):
    with pytest.raises(ValueError, match=f"a comparison of {target}"):
        Compare("a", target, CompareOperator.EQUAL, value)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_a_transaction_is_done_if_all_of_its_conditions_hold(first, second):
    machine = new_machine()
    machine.transaction([], [PutOp("a", b"1", NO_LEASE), PutOp("b", b"1", NO_LEASE)])
    compares = [
        Compare(key, CompareTarget.VERSION, CompareOperator.EQUAL, version)
        for key, version in (("a", first), ("b", second))
    ]
    result = machine.transaction(compares, [PutOp("c", b"done", NO_LEASE)])
    assert result.succeeded is (first == second == 1)
    found = machine.range("c")
    assert bool(found) is result.succeeded
