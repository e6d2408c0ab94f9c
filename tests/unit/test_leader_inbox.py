"""A leader that is cancelled stops, whatever comes at the same moment."""

import asyncio

import pytest

from resilient_jax.cluster import leader
from resilient_jax.cluster.leader import wait_next_event
from resilient_jax.cluster.membership import MembershipEvent, Tick


def test_a_leader_whose_session_ended_stops_although_an_event_comes_at_the_same_moment() -> None:
    """Else it campaigns for ever with a lease that is gone, and its agent waits for it and never comes back."""

    async def run() -> None:
        inbox: asyncio.Queue[MembershipEvent] = asyncio.Queue()
        waiting = asyncio.create_task(wait_next_event(inbox))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        inbox.put_nowait(Tick())  # the event is there,
        waiting.cancel()  # and its taker is told to stop before it could take it
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_when_nothing_comes_it_is_time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "TICK_INTERVAL_S", 0.01)
    assert asyncio.run(wait_next_event(asyncio.Queue())) == Tick()
