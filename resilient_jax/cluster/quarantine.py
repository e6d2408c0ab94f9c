"""The records of hosts in quarantine: they end with their leases, or when an operator clears them."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.protocol.quarantine import QuarantineRecord
from resilient_jax.protocol.store_keys import (
    make_leader_key,
    make_losses_key,
    make_quarantine_key,
    make_quarantine_prefix,
)
from resilient_jax.store.interface import (
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteOp,
    PutOp,
    Store,
)

MAX_DOUBLINGS: Final = 4
"""Of the time of a quarantine, where the cause comes back each time that it is over: 16 times as long, at most."""


def extend_quarantine_s(quarantine_s: float, num_before: int) -> float:
    """Return how long a quarantine lasts after so many for the same cause: twice as long each time, up to a limit."""
    return quarantine_s * 2.0 ** min(num_before, MAX_DOUBLINGS)


async def quarantine_host(
    context: AgentContext,
    host: HostName,
    reason: str,
    *,
    num_before: int = 0,
    until_wall_s: float | None = None,
    leader_token: Revision | None = None,
) -> None:
    """Write that a host takes no part for `quarantine_s` or longer, and record it.

    Args:
        reason: text for people.
        num_before: how often the host was in quarantine for this cause: each time doubles the time, up to
            `MAX_DOUBLINGS`.
        until_wall_s: end of the quarantine, in seconds since 1970; None: as `quarantine_s` and `num_before` say.
        leader_token: token of the leader that decides; nothing is written if another leads by now. None: the host's own
            agent decides.

    Raises:
        PeerError: the store did not answer.
    """
    settings = context.settings
    now_s = context.clock.wall_s()
    usual_s = extend_quarantine_s(settings.config.quarantine_s, num_before)
    until_s = now_s + usual_s if until_wall_s is None else until_wall_s
    seconds = max(until_s - now_s, 0.0)
    record = QuarantineRecord(host=host, reason=reason, since_wall_s=now_s, until_wall_s=until_s)
    written = await write_quarantine(context.store, settings.job, record, leader_token=leader_token)
    if written:
        context.log.record(EventKind.HOST_QUARANTINED, quarantined=host, seconds=seconds, reason=reason)
        context.print_line(f"{host}: in quarantine for {seconds:g} s: {reason}")


async def write_quarantine(
    store: Store, job: JobName, record: QuarantineRecord, *, leader_token: Revision | None = None
) -> bool:
    """Write a record that ends with a lease; return whether it was written, see `quarantine_host`."""
    lease = await store.grant(max(record.until_wall_s - record.since_wall_s, 1.0))
    compares = require_leader(job, leader_token)
    key = make_quarantine_key(job, record.host)
    return (await store.transaction(compares, [PutOp(key, ENCODER.encode(record), lease)])).succeeded


def require_leader(job: JobName, leader_token: Revision | None) -> list[Compare]:
    """Return what must be true of the store as long as this leader leads; nothing without one."""
    if leader_token is None:
        return []
    leader = make_leader_key(job)
    return [Compare(leader, CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, leader_token)]


async def read_quarantine(store: Store, job: JobName) -> tuple[QuarantineRecord, ...]:
    """Return the records of all hosts in quarantine, by name."""
    _, found = await store.range(make_quarantine_prefix(job))
    return tuple(decode_record(record, QuarantineRecord) for record in found)


async def clear_quarantine(store: Store, job: JobName, host: HostName) -> bool:
    """End a host's quarantine, and forget how often it was lost; return whether it was in one."""
    key = make_quarantine_key(job, host)
    if await store.get(key) is None:
        return False
    await store.transaction([], [DeleteOp(key), DeleteOp(make_losses_key(job, host))])
    return True


async def follow_quarantine(store: Store, job: JobName) -> AsyncGenerator[frozenset[HostName], None]:
    """Yield the hosts in quarantine, now and after each change, until the watch fails."""
    prefix = make_quarantine_prefix(job)
    revision, found = await store.range(prefix)
    hosts = frozenset(decode_record(record, QuarantineRecord).host for record in found)
    if hosts:
        yield hosts
    async with contextlib.aclosing(store.watch(prefix, Revision(revision + 1))) as batches:
        async for _ in batches:
            _, found = await store.range(prefix)
            yield frozenset(decode_record(record, QuarantineRecord).host for record in found)
