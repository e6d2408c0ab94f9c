"""A generation, applied as a change to the one before, is the same; an agent that cannot apply one notices."""

import random
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.protocol import generation_change
from resilient_jax.protocol.generation import (
    Generation,
    GenerationPhase,
    Member,
    Membership,
    ResumedState,
    WorldChange,
)
from resilient_jax.protocol.generation_change import (
    AddedItems,
    GenerationChange,
    apply_change,
    describe_change,
    digest_record,
)
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPlan, SnapshotSource
from resilient_jax.protocol.state_records import StateSource


def make_member(index: int, incarnation: int = 1) -> Member:
    return Member(
        host=HostName(f"host-{index:05}"),
        incarnation=Incarnation(incarnation),
        seat=Seat(index),
        endpoint=f"10.0.{index // 256}.{index % 256}:41233",
    )


def make_generation(num_hosts: int, number: int = 1) -> Generation:
    members = tuple(make_member(index) for index in range(num_hosts))
    return Generation(
        number=GenerationNumber(number),
        phase=GenerationPhase.ACTIVE,
        membership=Membership(
            world=WorldId(1), num_seats=num_hosts + 4, members=members, service_address="10.0.0.1:4000"
        ),
        state=ResumedState(
            sources=tuple(StateSource(host=m.host, endpoint=m.endpoint) for m in members[:64])
        ),
    )


def send(change: GenerationChange) -> GenerationChange:
    """Return a change as another process reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=GenerationChange)


def lose(before: Generation, index: int, phase: GenerationPhase = GenerationPhase.FORM) -> Generation:
    return change_fields(
        before,
        number=GenerationNumber(before.number + 1),
        phase=phase,
        change=WorldChange.SHRINK,
        members=(*before.membership.members[:index], *before.membership.members[index + 1 :]),
        reason=f"lost host-{index:05}",
    )


def test_the_loss_of_one_of_some_thousand_hosts_is_a_change_of_some_hundred_bytes():
    before = make_generation(4096)
    after = lose(before, 77)
    change = describe_change(before, after)
    assert len(msgspec.msgpack.encode(after)) > 200_000
    assert len(msgspec.msgpack.encode(change)) < 500
    assert apply_change(before, send(change)) == after


def test_a_new_phase_is_a_change_of_even_less():
    before = make_generation(4096)
    after = change_fields(before, phase=GenerationPhase.PAUSE, reason="host-9 asked to join")
    change = describe_change(before, after)
    assert not change.lists
    assert apply_change(before, send(change)) == after


def test_a_small_generation_is_its_own_change_so_that_a_host_that_missed_one_needs_no_other():
    before, after = make_generation(4), lose(make_generation(4), 1)
    assert apply_change(None, send(describe_change(before, after))) == after


def test_the_first_generation_of_some_thousand_hosts_is_its_own_change_at_a_fifth_of_the_size():
    first = make_generation(4096)
    change = describe_change(None, first)
    assert len(msgspec.msgpack.encode(change)) < len(msgspec.msgpack.encode(first)) // 5
    assert apply_change(None, send(change)) == first


def test_a_host_that_missed_a_change_needs_the_record_or_a_change_that_has_all():
    before = make_generation(512)
    middle = lose(before, 3)
    after = lose(middle, 5)
    change = send(describe_change(middle, after))
    assert apply_change(before, change) is None
    assert apply_change(None, change) is None
    assert apply_change(middle, change) == after
    assert apply_change(before, send(describe_change(None, after))) == after


def test_a_change_that_would_be_larger_has_all():
    before, after = make_generation(512), make_generation(512, number=2)
    members = tuple(make_member(index, incarnation=2) for index in range(512))
    after = change_fields(after, members=members)
    change = describe_change(before, after)
    assert not change.base
    assert apply_change(None, send(change)) == after


def test_a_record_that_is_large_even_when_compressed_must_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation_change, "MAX_PACKED_BYTES", 1000)
    assert apply_change(None, send(describe_change(None, make_generation(4096)))) is None


def test_a_change_that_was_damaged_is_not_applied():
    before = make_generation(512)
    change = describe_change(before, lose(before, 3))
    for damaged in (
        msgspec.structs.replace(change, values={**change.values, "step": 9}),
        msgspec.structs.replace(change, values={**change.values, "step": "nine"}),
        msgspec.structs.replace(change, lists={"members": [AddedItems(items=[])]}),
        msgspec.structs.replace(change, digest=b"other"),
    ):
        assert apply_change(before, send(damaged)) is None
    whole = describe_change(None, before)
    for packed in (
        b"",
        b"garbage",
        whole.packed[:-9],
        zlib.compress(b"garbage"),
        zlib.compress(bytes(2**24)),
    ):
        assert apply_change(before, send(msgspec.structs.replace(whole, packed=packed))) is None
    garbage = GenerationChange(base=b"", digest=digest_record(b"garbage"), packed=zlib.compress(b"garbage"))
    assert apply_change(before, send(garbage)) is None


@given(st.randoms(use_true_random=False))
def test_any_change_of_any_list_is_applied_as_it_was_described(chance: random.Random):
    before = make_generation(300)
    members = list(before.membership.members)
    for _ in range(chance.randrange(6)):
        index = chance.randrange(len(members))
        match chance.randrange(4):
            case 0:
                del members[index]
            case 1:
                members.insert(index, make_member(chance.randrange(1000), 2))
            case 2:
                members[index] = make_member(chance.randrange(300), 3)
            case _:
                members.append(members.pop(index))
    group = ParityGroup(hosts=(HostName("a"), HostName("b")), parity=1)
    plan = SnapshotPlan(
        id=SnapshotId(chance.randrange(9), before.number),
        groups=(group,),
        sources=(SnapshotSource(host=HostName("a"), endpoint="a:1"),),
    )
    after = change_fields(
        before,
        number=GenerationNumber(before.number + 1),
        members=tuple(members),
        receivers=tuple(m.host for m in members[: chance.randrange(5)]),
        snapshot=chance.choice((None, plan)),
        unreadable_snapshots=chance.choice(((), (plan.id,))),
    )
    assert apply_change(before, send(describe_change(before, after))) == after
