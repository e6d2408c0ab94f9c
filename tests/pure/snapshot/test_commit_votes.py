"""The votes that the root counts."""

from resilient_jax.snapshot.commit_votes import CommitVotes
from resilient_jax.snapshot.messages import (
    CommitOutcome,
)
from tests.pure.snapshot.snapshot_slots import HOST, PEER, make_id


def test_a_snapshot_is_committed_when_the_last_host_is_complete():
    board = CommitVotes()
    board.record_complete(make_id(1), HOST)
    board.record_complete(make_id(1), HOST)
    assert not board.is_complete(make_id(1), {HOST, PEER})
    board.record_complete(make_id(1), PEER)
    assert board.is_complete(make_id(1), {HOST, PEER})
    assert board.outcome(make_id(1)).outcome is CommitOutcome.WAITING
    assert board.commit(make_id(1)).outcome is CommitOutcome.COMMITTED


def test_the_first_outcome_stands():
    board = CommitVotes()
    board.record_dropped(make_id(1), "b is gone")
    assert board.commit(make_id(1)).outcome is CommitOutcome.DROPPED
    board.commit(make_id(2))
    board.record_dropped(make_id(2), "too late")
    assert board.outcome(make_id(2)).outcome is CommitOutcome.COMMITTED
    assert board.outcome(make_id(1)).reason == "b is gone"
