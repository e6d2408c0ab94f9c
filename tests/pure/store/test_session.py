"""A host's registration in virtual time: its name, its lease, and the fence that the lease is."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from resilient_jax.clock import Clock
from resilient_jax.cluster.name_holder import AskHolder, NameHolder, assume_alive
from resilient_jax.cluster.store_session import RENEWALS_PER_TTL, SessionLost, StoreSession
from resilient_jax.errors import JoinRefused, LeaseExpired, PeerUnreachable
from resilient_jax.ids import HostName, JobName, LeaseId
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.protocol.versions import Versions
from resilient_jax.store.memory import EXPIRY_CHECK_INTERVAL_S, MemoryStore
from tests.support.manual_clock import ManualClock
from tests.support.virtual_time import ROUND_S, run_in_virtual_time

JOB = JobName("job")
KEY = make_host_key(JOB, HostName("a"))
TTL_S = 1.5
FEW_ROUNDS_S = 20 * ROUND_S
VERSIONS = Versions(python="3", resilient_jax="1.0", jax="0.10.0", jaxlib="0.10.0")


class Distant:
    """A store at the other end of a network: messages take as long as the test says, both ways."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.request_s = 0.0
        self.answer_s = 0.0
        self.refusal: Exception | None = None
        self.renewed_s: list[float] = []
        """When each renewal came to the store."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def grant(self, ttl_s: float) -> LeaseId:
        return await self._carry(lambda: self._store.grant(ttl_s))

    async def keep_alive(self, lease: LeaseId) -> float:
        if self.refusal is not None:
            raise self.refusal
        return await self._carry(lambda: self._store.keep_alive(lease))

    async def _carry(self, call: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(self.request_s)
        found = await call()
        self.renewed_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.answer_s)
        return found


def make_session(
    store: Any,
    clock: Clock,
    pid: int = 7,
    versions: Versions = VERSIONS,
    on_renewed: Callable[[float], None] = lambda until_s: None,
    ask_holder: AskHolder = assume_alive,
) -> StoreSession:
    def status() -> HostStatus:
        return HostStatus(
            host=HostName("a"),
            agent=AgentStatus(id=f"a-{pid}", pid=pid, address="10.0.0.7", versions=versions),
        )

    return StoreSession(store, JOB, TTL_S, clock, status, on_renewed, ask_holder=ask_holder)


def run(main: Callable[[Distant, ManualClock], Awaitable[None]]) -> None:
    """Run a test with a store in virtual time."""

    async def with_store(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store:
            await main(Distant(store), clock)

    run_in_virtual_time(with_store)


@pytest.mark.parametrize(("request_s", "answer_s"), [(0.0, 0.0), (0.4, 0.0), (0.0, 0.4), (0.3, 0.3)])
def test_a_host_counts_itself_as_dead_before_the_store_does(request_s: float, answer_s: float) -> None:
    """Whatever a message takes: the host counts from when it asked, the store from when it heard."""

    async def main(store: Distant, clock: ManualClock) -> None:
        store.request_s, store.answer_s = request_s, answer_s
        until_s: list[float] = []
        mine = make_session(store, clock, on_renewed=until_s.append)
        await mine.open()
        assert mine.valid_until_s == pytest.approx(store.renewed_s[0] - request_s + TTL_S)
        renewing = asyncio.create_task(mine.keep_alive())
        await asyncio.sleep(10 * TTL_S)
        assert len(until_s) >= 10
        for valid_until_s, renewed_s in zip(until_s, store.renewed_s[1:], strict=False):
            assert valid_until_s == pytest.approx(renewed_s - request_s + TTL_S)
        assert await store.get(KEY) is not None
        renewing.cancel()

    run(main)


def test_a_host_that_waits_for_its_name_counts_from_its_last_request() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        await make_session(store, clock).open()  # and dies
        store.request_s = 0.2
        mine = make_session(store, clock, pid=8)
        await mine.open()
        assert mine.valid_until_s <= store.renewed_s[-1] + TTL_S - store.request_s + 1e-6

    run(main)


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_a_session_is_lost_when_it_was_not_renewed_for_its_time_to_live(how: str) -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        mine = make_session(store, clock)
        await mine.open()
        renewing = asyncio.create_task(mine.keep_alive())
        await asyncio.sleep(10.1 * TTL_S)
        valid_until_s = mine.valid_until_s
        if how == "hangs":
            store.answer_s = 1000.0
        else:
            store.refusal = PeerUnreachable("no route")
        with pytest.raises(SessionLost, match=r"the store did not renew the lease for 1\.5 s"):
            await renewing
        assert clock.monotonic_s() == pytest.approx(valid_until_s, abs=FEW_ROUNDS_S)

    run(main)


def test_an_answer_that_comes_after_the_fence_renews_nothing() -> None:
    """The store has renewed the lease; but the host has no way to know, and others may count it as dead."""

    async def main(store: Distant, clock: ManualClock) -> None:
        mine = make_session(store, clock)
        await mine.open()
        store.answer_s = TTL_S + 0.1
        with pytest.raises(SessionLost):
            await mine.keep_alive()
        assert clock.monotonic_s() == pytest.approx(TTL_S, abs=FEW_ROUNDS_S)

    run(main)


def test_a_session_outlives_failures_that_are_shorter_than_its_time_to_live() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        mine = make_session(store, clock)
        await mine.open()
        renewing = asyncio.create_task(mine.keep_alive())
        for _ in range(5):
            store.refusal = PeerUnreachable("no route")
            await asyncio.sleep(TTL_S * (1 - 1.5 / RENEWALS_PER_TTL))
            store.refusal = None
            await asyncio.sleep(TTL_S)
        assert not renewing.done()
        assert await store.get(KEY) is not None
        renewing.cancel()

    run(main)


@pytest.mark.parametrize("follow", [StoreSession.keep_alive, StoreSession.publish_changes])
def test_a_revoked_lease_ends_the_session(follow: Callable[[StoreSession], Awaitable[None]]) -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        mine = make_session(store, clock)
        await mine.open()
        mine.mark_changed()
        await store.revoke(mine.lease)
        with pytest.raises(SessionLost, match="the lease expired"):
            await follow(mine)

    run(main)


def test_the_name_of_a_live_agent_is_refused_after_the_time_to_live() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        first = make_session(store, clock)
        await first.open()
        renewing = asyncio.create_task(first.keep_alive())
        began_s = clock.monotonic_s()
        with pytest.raises(
            JoinRefused, match=r"taken by another living agent \(agent process 7 at 10\.0\.0\.7\)"
        ):
            await make_session(store, clock, pid=8).open()
        assert TTL_S < clock.monotonic_s() - began_s < TTL_S + 2.5
        renewing.cancel()

    run(main)


def test_the_name_of_an_agent_that_was_killed_is_free_when_its_lease_ends() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        await make_session(store, clock).open()  # never renewed
        second = make_session(store, clock, pid=8)
        await second.open()
        found = await store.get(KEY)
        assert found is not None
        assert found.lease == second.lease
        assert TTL_S <= clock.monotonic_s() <= TTL_S + EXPIRY_CHECK_INTERVAL_S + 0.25

    run(main)


async def hold_name(store: Distant, clock: ManualClock, pid: int = 7) -> "asyncio.Task[None]":
    """Have an agent take the name under a lease that does not end."""
    first = make_session(store, clock, pid)
    await first.open()
    return asyncio.create_task(first.keep_alive())


def test_the_lease_of_an_agent_that_is_gone_is_ended_however_long_it_would_last() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        renewing = await hold_name(store, clock)
        asked: list[str] = []

        async def ask(holder: HostStatus) -> NameHolder:
            asked.append(holder.agent.id)
            return NameHolder.GONE

        second = make_session(store, clock, 8, ask_holder=ask)
        await second.open()
        found = await store.get(KEY)
        assert found is not None
        assert found.lease == second.lease
        assert asked == ["a-7"]
        renewing.cancel()

    run(main)


def test_an_agent_that_does_not_answer_keeps_its_name_until_its_lease_ends() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        renewing = await hold_name(store, clock)

        async def ask(_: HostStatus) -> NameHolder:
            if clock.monotonic_s() > 20 * TTL_S:
                renewing.cancel()  # the cluster prolongs it no more
            await asyncio.sleep(TTL_S)  # longer than may be waited for an answer
            return NameHolder.ALIVE

        second = make_session(store, clock, 8, ask_holder=ask)
        await second.open()
        assert clock.monotonic_s() > 20 * TTL_S
        found = await store.get(KEY)
        assert found is not None
        assert found.lease == second.lease

    run(main)


def test_a_name_is_not_waited_for_without_end() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        renewing = await hold_name(store, clock)

        async def ask(_: HostStatus) -> NameHolder:
            return NameHolder.SILENT

        with pytest.raises(
            JoinRefused, match=r"at 10\.0\.0\.7\), which has not answered for 12\d s; every host"
        ):
            await make_session(store, clock, 8, ask_holder=ask).open()
        renewing.cancel()

    run(main)


def test_an_agent_that_lost_its_session_takes_its_own_name_again() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        renewing = await hold_name(store, clock)
        began_s = clock.monotonic_s()
        again = make_session(store, clock)
        await again.open()
        assert clock.monotonic_s() - began_s < TTL_S
        renewing.cancel()

    run(main)


def test_a_status_is_written_under_the_lease_and_over_the_one_before_it_alone() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        mine = make_session(store, clock)
        await mine.open()
        publishing = asyncio.create_task(mine.publish_changes())
        for version in (2, 3):
            mine.mark_changed()
            await asyncio.sleep(0.01)
            found = await store.get(KEY)
            assert found is not None
            assert (found.version, found.lease) == (version, mine.lease)
        publishing.cancel()

    run(main)


def test_a_status_that_another_host_has_the_name_of_is_not_written() -> None:
    """The lease ended and the name was taken, before the host noticed: its status must not overwrite the other's."""

    async def main(store: Distant, clock: ManualClock) -> None:
        old = make_session(store, clock)
        await old.open()
        await asyncio.sleep(TTL_S + EXPIRY_CHECK_INTERVAL_S)
        new = make_session(store, clock, pid=8)
        await new.open()
        old.mark_changed()
        with pytest.raises(SessionLost, match="the lease expired"):
            await old.publish_changes()
        found = await store.get(KEY)
        assert found is not None
        assert b"a-8" in found.value

    run(main)


def test_a_renewal_of_a_lease_that_has_ended_is_refused() -> None:
    async def main(store: Distant, clock: ManualClock) -> None:
        mine = make_session(store, clock)
        await mine.open()
        await asyncio.sleep(TTL_S + EXPIRY_CHECK_INTERVAL_S)
        with pytest.raises(LeaseExpired):
            await store.keep_alive(mine.lease)
        assert await store.get(KEY) is None

    run(main)
