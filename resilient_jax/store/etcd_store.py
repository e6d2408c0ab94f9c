"""The store of an etcd cluster, which may lose members and goes on; see `interface` for what it promises.

Where etcd differs from the interface:
- A lease lasts whole seconds, and at least one and a half times the cluster's election timeout; `grant` rounds up.
- A change that was reported as failed may still be made later (its member was only slow), and then undo a newer one.
  So a change whose order matters is a transaction that compares the key's `mod_revision`.
- The history is kept until it is compacted. A client that changes something compacts it every `keep_revisions` of them.
- `PutResponse` is made from the key's previous value.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.errors import (
    CallerError,
    CompactedRevision,
    LeaseExpired,
    PeerUnreachable,
    StoreReplaced,
    StoreUnreachable,
)
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.protocol.protobuf_classes import AnyMessage
from resilient_jax.store.change_history import KEEP_REVISIONS
from resilient_jax.store.etcd_address import EtcdAddress
from resilient_jax.store.etcd_connection import (
    COMPACT,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    TXN,
    EtcdConnection,
    EtcdMethod,
    EtcdUser,
)
from resilient_jax.store.etcd_encoding import EtcdEncoding
from resilient_jax.store.interface import (
    Compare,
    Operation,
    RangeOp,
    Store,
    TransactionResult,
    WatchEvent,
    check_key,
    check_operations,
    check_prefix,
    check_ttl,
)
from resilient_jax.store.watch_resumption import RETRY_INTERVAL_S, WatchProgress, resume_watch
from resilient_jax.transport.credentials import TlsFiles

CALL_TIMEOUT_S: Final = 5.0
RESUME_TIMEOUT_S: Final = 5.0
PROBE_TTL_S: Final = 1
"""The time to live that is asked for to learn the shortest that the cluster gives."""


class EtcdStore(Store):
    """A `Store` in an etcd cluster.

    After PeerUnreachable a change may have been made or not, or may still be. Reads, leases and watches go on with
    another member by themselves.

    Attributes:
        min_lease_ttl_s: shortest lease that the cluster gives; known from `connect` on.
    """

    def __init__(
        self,
        address: EtcdAddress,
        *,
        tls: TlsFiles | None = None,
        user: EtcdUser | None = None,
        keep_revisions: int = KEEP_REVISIONS,
        call_timeout_s: float = CALL_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """Create the client without connecting.

        Args:
            tls: certificates of a cluster that is served over TLS; None: without.
            keep_revisions: revisions of the history that are kept at least; at most twice as many are.
            resume_timeout_s: how long a broken watch tries to resume.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self.min_lease_ttl_s = float(PROBE_TTL_S)
        self._clock = clock if clock is not None else SystemClock()
        self._connection = EtcdConnection(address.endpoints, tls=tls, user=user, clock=self._clock)
        self._encoding = EtcdEncoding(address.namespace)
        self._keep_revisions = keep_revisions
        self._call_timeout_s = call_timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._cluster_id: int | None = None
        self._compacted = 0
        """How often `keep_revisions` fits in the revision of the last compaction."""

    async def connect(
        self, timeout_s: float, on_progress: Callable[[float, PeerUnreachable], None] | None = None
    ) -> None:
        """Wait until the cluster answers, and learn its shortest lease.

        Raises:
            StoreUnreachable: the cluster did not answer for `timeout_s`; the message says what to do.
            Unauthenticated: the cluster refused the client; raised at once.
        """
        began_s = self._clock.monotonic_s()
        while True:
            try:
                lease = await self._call(LEASE_GRANT, is_repeatable=False, TTL=PROBE_TTL_S)
            except PeerUnreachable as error:
                elapsed_s = self._clock.monotonic_s() - began_s
                if on_progress is not None:
                    on_progress(elapsed_s, error)
                if elapsed_s < timeout_s:
                    await asyncio.sleep(RETRY_INTERVAL_S)
                    continue
                raise StoreUnreachable(
                    f"no member of {self.address} answered for {elapsed_s:.1f} s (last: {error}). Check the addresses, "
                    "that more than half of the members run (etcdctl endpoint status), and whether they expect TLS"
                ) from error
            self.min_lease_ttl_s = float(lease.TTL)
            await self.revoke(LeaseId(lease.ID))
            return

    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Run a transaction; see `Store.transaction`."""
        for operations in (success_ops, failure_ops):
            check_operations(operations)
        for compare in compares:
            check_key(compare.key)
        response = await self._call(
            TXN,
            is_repeatable=all(isinstance(operation, RangeOp) for operation in (*success_ops, *failure_ops)),
            compare=[self._encoding.encode_compare(compare) for compare in compares],
            success=[self._encoding.encode_operation(operation) for operation in success_ops],
            failure=[self._encoding.encode_operation(operation) for operation in failure_ops],
        )
        revision = Revision(response.header.revision)
        operations = success_ops if response.succeeded else failure_ops
        responses = tuple(
            self._encoding.decode_response(operation, found, revision)
            for operation, found in zip(operations, response.responses, strict=True)
        )
        if any(not isinstance(operation, RangeOp) for operation in operations):
            await self._compact(revision)
        return TransactionResult(succeeded=bool(response.succeeded), revision=revision, responses=responses)

    async def grant(self, ttl_s: float) -> LeaseId:
        """Return a new lease; see `Store.grant`. The lease may last longer than asked for."""
        check_ttl(ttl_s)
        return LeaseId((await self._call(LEASE_GRANT, is_repeatable=True, TTL=math.ceil(ttl_s))).ID)

    async def keep_alive(self, lease: LeaseId) -> float:
        """Extend a lease; see `Store.keep_alive`."""
        response = await self._call(LEASE_KEEP_ALIVE, is_repeatable=True, ID=lease)
        if response.TTL <= 0:
            raise LeaseExpired(f"lease {lease} is gone")
        return float(response.TTL)

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see `Store.revoke`."""
        await self._call(LEASE_REVOKE, is_repeatable=False, ID=lease)

    async def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        """Yield as `Store.watch` does, and resume at another member when the stream breaks.

        Raises:
            PeerUnreachable: the stream broke and no member answered for `resume_timeout_s`.
            StoreReplaced: another cluster answers now, in which our revisions and leases have no meaning.
            CompactedRevision: see `Store.watch`.
        """
        check_prefix(prefix)
        watch = resume_watch(
            lambda revision, _: self._watch_once(prefix, revision),
            from_revision,
            what=f"a watch of {prefix!r} at {self.address}",
            resume_timeout_s=self._resume_timeout_s,
            is_closed=lambda: self._connection.is_closed,
            clock=self._clock,
        )
        async with contextlib.aclosing(watch) as batches:
            async for events in batches:
                yield events

    async def close(self) -> None:
        """Close the connections, which ends all watches; see `Store.close`."""
        await self._connection.close()

    async def _watch_once(self, prefix: str, from_revision: Revision) -> WatchProgress:
        """Yield the progress of a watch at one member."""
        events: list[WatchEvent] = []
        following = from_revision
        responses = self._connection.watch(
            **self._encoding.make_range(prefix, is_prefix=True), start_revision=from_revision, fragment=True
        )
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._check_cluster(response.header.cluster_id)
                if response.compact_revision:
                    raise CompactedRevision(
                        f"revision {from_revision} is compacted: the history begins with "
                        f"{response.compact_revision}. Read with range, then watch from its revision + 1"
                    )
                if response.canceled:
                    raise PeerUnreachable(f"etcd ended a watch of {prefix!r}: {response.cancel_reason}")
                events += map(self._encoding.decode_event, response.events)
                if response.fragment:
                    continue  # the rest of a large response follows
                # Only events move a watch on: the revision of an answer to a progress request may overtake them
                # (etcd before 3.4.25 and 3.5.8).
                if events:
                    following = Revision(events[-1].mod_revision + 1)
                yield events, following
                events = []

    async def _compact(self, revision: Revision) -> None:
        """Forget old revisions, once in `keep_revisions` of them; another client may be faster."""
        number = revision // self._keep_revisions
        if number <= self._compacted:
            return
        self._compacted = number
        oldest = revision - self._keep_revisions
        if oldest <= 0:
            return
        with contextlib.suppress(PeerUnreachable, CompactedRevision):
            await self._call(COMPACT, is_repeatable=False, revision=oldest)

    async def _call(self, method: EtcdMethod, *, is_repeatable: bool, **fields: object) -> AnyMessage:
        response = await self._connection.call(
            method, timeout_s=self._call_timeout_s, is_repeatable=is_repeatable, **fields
        )
        self._check_cluster(response.header.cluster_id)
        return response

    def _check_cluster(self, cluster_id: int) -> None:
        if self._cluster_id is None:
            self._cluster_id = cluster_id
        if cluster_id != self._cluster_id:
            raise StoreReplaced(
                f"etcd cluster {self._cluster_id:x} is gone with all its keys; cluster {cluster_id:x} answers at "
                f"{self.address} in its place. A job ends with its store: start all its agents again, and it continues "
                "from its newest checkpoint"
            )


def check_lease_ttl(store: EtcdStore, lease_ttl_s: float) -> None:
    """Check that the cluster gives leases as short as the job's.

    Raises:
        CallerError: the cluster's shortest lease is longer; the message says what to set.
    """
    if lease_ttl_s < store.min_lease_ttl_s:
        raise CallerError(
            f"lease_ttl_s: found {lease_ttl_s:g}, but the shortest lease of {store.address} is "
            f"{store.min_lease_ttl_s:g} s, one and a half times its election timeout, rounded up; expected at least "
            "that. Raise lease_ttl_s, or start etcd with --heartbeat-interval=50 --election-timeout=500"
        )
