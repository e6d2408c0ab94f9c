"""A leader that is cancelled stops, whatever event arrives at the same moment."""

import asyncio

import pytest

from resilient_jax.cluster import leader
from resilient_jax.cluster.leader import wait_next_event
from resilient_jax.membership.machine import MembershipEvent, Tick


def test_a_leader_whose_session_ended_stops_although_an_event_comes_at_the_same_moment() -> None:
    """Otherwise the leader campaigns forever with an expired lease, and its agent, which awaits it, never rejoins."""

    async def run() -> None:
        inbox: asyncio.Queue[MembershipEvent] = asyncio.Queue()
        waiting = asyncio.create_task(wait_next_event(inbox))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        inbox.put_nowait(Tick())  # the event is in the queue,
        waiting.cancel()  # and the reader is cancelled before it could take the event
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_without_an_event_the_leader_polls_after_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "TICK_INTERVAL_S", 0.01)
    assert asyncio.run(wait_next_event(asyncio.Queue())) == Tick()
