"""Calls to an etcd cluster of which any member may be gone.

One member is asked until it does not answer; then the next one is. Every call carries `hasleader`, so that a member
that is cut off from the others refuses it at once instead of waiting.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio

from resilient_jax.clock import Clock
from resilient_jax.errors import (
    CallerError,
    CompactedRevision,
    InternalError,
    LeaseExpired,
    OperatorError,
    PeerUnreachable,
    ResilientJaxError,
    Unauthenticated,
)
from resilient_jax.protocol.protobuf_classes import AnyMessage
from resilient_jax.store.etcd_messages import get_message_class
from resilient_jax.transport.channel import is_task_cancelled
from resilient_jax.transport.credentials import TlsFiles
from resilient_jax.transport.grpc_options import INITIAL_BACKOFF_MS, MAX_BACKOFF_MS, GrpcOptions
from resilient_jax.transport.renewed_channel import RenewedChannel

ATTEMPT_TIMEOUT_S: Final = 1.0
"""Until another member is asked. A healthy cluster answers within 10 ms; while it elects a leader it does not."""
REPEATABLE_ATTEMPT_TIMEOUT_S: Final = 0.5
"""The same of a request that may be carried out twice, such as a keep-alive, for which a lease waits."""
RETRY_INTERVAL_S: Final = 0.05
PROGRESS_INTERVAL_S: Final = 0.5
"""The interval in which a watch asks for a sign of life, which a stopped member does not give."""
SILENCE_LIMIT_S: Final = 1.5
"""Without any for so long a watch is broken."""

_Call: TypeAlias = Any
"""A call of grpc.aio, whose stubs have no type for one of any kind."""
_EOF = cast(Any, grpc.aio).EOF  # missing in the type stubs
_OPTIONS: Final[GrpcOptions] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", INITIAL_BACKOFF_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", int(ATTEMPT_TIMEOUT_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]  # no keepalive: etcd ends connections that ping more often than every 5 s
_HAS_LEADER: Final = ("hasleader", "true")
_NOT_SENT: Final = ("Connection refused", "failed to connect", "etcdserver: no leader")
"""Texts of failures in which the request was not carried out, so that it may be sent again whatever it does."""


@dataclasses.dataclass(frozen=True, slots=True)
class EtcdUser:
    """A user of a cluster with authentication."""

    name: str
    password: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class EtcdMethod:
    """A method of etcd's gRPC interface, and the names of its messages."""

    path: str
    request: str
    response: str


TXN: Final = EtcdMethod("/etcdserverpb.KV/Txn", "TxnRequest", "TxnResponse")
COMPACT: Final = EtcdMethod("/etcdserverpb.KV/Compact", "CompactionRequest", "CompactionResponse")
LEASE_GRANT: Final = EtcdMethod("/etcdserverpb.Lease/LeaseGrant", "LeaseGrantRequest", "LeaseGrantResponse")
LEASE_REVOKE: Final = EtcdMethod(
    "/etcdserverpb.Lease/LeaseRevoke", "LeaseRevokeRequest", "LeaseRevokeResponse"
)
LEASE_KEEP_ALIVE: Final = EtcdMethod(
    "/etcdserverpb.Lease/LeaseKeepAlive", "LeaseKeepAliveRequest", "LeaseKeepAliveResponse"
)
WATCH: Final = EtcdMethod("/etcdserverpb.Watch/Watch", "WatchRequest", "WatchResponse")
AUTHENTICATE: Final = EtcdMethod(
    "/etcdserverpb.Auth/Authenticate", "AuthenticateRequest", "AuthenticateResponse"
)
_STREAMS: Final = (LEASE_KEEP_ALIVE, WATCH)
"""Methods with streams in both directions."""


class EtcdConnection:
    """The channels to the members of a cluster, one of which is in use."""

    def __init__(
        self, endpoints: tuple[str, ...], *, tls: TlsFiles | None, user: EtcdUser | None, clock: Clock
    ) -> None:
        """Create the channels without connecting.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.endpoints = endpoints
        self.is_closed = False
        self._channels = [RenewedChannel(endpoint, tls, _make_options) for endpoint in endpoints]
        self._current = 0
        self._user = user
        self._token: str | None = None
        self._clock = clock

    async def call(
        self, method: EtcdMethod, *, timeout_s: float, is_repeatable: bool, **fields: object
    ) -> AnyMessage:
        """Return the response to a request with these fields; of a method with streams, the first one.

        Args:
            timeout_s: the limit of all attempts together.
            is_repeatable: whether the request may be carried out twice. If not, the request is sent again only where it
                was certainly not carried out.

        Raises:
            PeerUnreachable: no member answered; the request may have been carried out or not.
            LeaseExpired, CompactedRevision, CallerError, Unauthenticated, OperatorError: etcd's answer.
        """
        request = get_message_class(method.request)(**fields)
        end_s = self._clock.monotonic_s() + timeout_s
        attempt_s = REPEATABLE_ATTEMPT_TIMEOUT_S if is_repeatable else ATTEMPT_TIMEOUT_S
        attempts = 0
        while True:
            member = self._current
            left_s = end_s - self._clock.monotonic_s()
            try:
                return await self._call_member(member, method, request, min(attempt_s, max(left_s, 0.1)))
            except PeerUnreachable as error:
                self.rotate(member)
                attempts += 1
                can_repeat = is_repeatable or error.is_refused
                is_late = self._clock.monotonic_s() + RETRY_INTERVAL_S >= end_s
                if self.is_closed or not can_repeat or is_late:
                    raise
            if attempts % len(self.endpoints) == 0:
                await asyncio.sleep(RETRY_INTERVAL_S)

    def rotate(self, failed: int) -> None:
        """Ask the next member from now on, unless another call has found out the same."""
        if self._current == failed:
            self._current = (failed + 1) % len(self.endpoints)

    async def watch(self, **fields: object) -> AsyncGenerator[AnyMessage, None]:
        """Yield the responses to a watch with these fields of its `create_request`, from one member.

        Raises:
            PeerUnreachable: the member gave no sign of life for `SILENCE_LIMIT_S`, or has no leader.
            Unauthenticated: as `call`.
        """
        member = self._current
        request_class = get_message_class(WATCH.request)
        try:
            metadata = await self._metadata(member)
        except PeerUnreachable:
            self.rotate(member)
            raise
        call = self._open_call(member, WATCH, metadata)
        asking: asyncio.Task[None] | None = None
        try:
            await call.write(request_class(create_request=fields))
            asking = asyncio.create_task(_ask_for_progress(call, request_class(progress_request={})))
            while (response := await self._read_within(call, SILENCE_LIMIT_S)) is not _EOF:
                if response.canceled and self._forget_token(response.cancel_reason):
                    raise PeerUnreachable(f"{self.endpoints[member]} does not know our token any more")
                yield response
        except TimeoutError as error:
            self.rotate(member)
            raise PeerUnreachable(
                f"{self.endpoints[member]} gave no sign of life for {SILENCE_LIMIT_S:g} s"
            ) from error
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.rotate(member)
            raise self._explain(error, member, WATCH.path) from error
        except asyncio.CancelledError as error:
            if not is_task_cancelled():
                raise self._closed(WATCH.path) from error
            raise
        finally:
            if asking is not None:
                asking.cancel()
            call.cancel()

    async def close(self) -> None:
        """End all calls and connections."""
        self.is_closed = True
        for channel in self._channels:
            await channel.close()

    async def _call_member(
        self, member: int, method: EtcdMethod, request: AnyMessage, timeout_s: float
    ) -> AnyMessage:
        for is_last in (False, True):
            metadata = await self._metadata(member) if method is not AUTHENTICATE else ()
            try:
                return await self._exchange(member, method, request, metadata, timeout_s)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                details = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else ""
                if self._forget_token(details) and not is_last:
                    continue
                raise self._explain(error, member, method.path) from error
            except asyncio.CancelledError as error:
                if not is_task_cancelled():
                    raise self._closed(method.path) from error
                raise
        raise AssertionError("the last round returns or raises")

    async def _exchange(
        self,
        member: int,
        method: EtcdMethod,
        request: AnyMessage,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
    ) -> AnyMessage:
        call = self._open_call(member, method, metadata, request, timeout_s)
        if method not in _STREAMS:
            return await call
        try:
            await call.write(request)
            response = await call.read()
        finally:
            call.cancel()
        if response is _EOF:
            raise PeerUnreachable(f"{self.endpoints[member]} ended {method.path} without an answer")
        return response

    def _open_call(
        self,
        member: int,
        method: EtcdMethod,
        metadata: tuple[tuple[str, str], ...],
        request: AnyMessage = None,
        timeout_s: float | None = None,
    ) -> _Call:
        channel = self._channels[member].get()
        serialize = get_message_class(method.request).SerializeToString
        deserialize = get_message_class(method.response).FromString
        if method in _STREAMS:
            return channel.stream_stream(method.path, serialize, deserialize)(
                timeout=timeout_s, metadata=metadata
            )
        return channel.unary_unary(method.path, serialize, deserialize)(
            request, timeout=timeout_s, metadata=metadata
        )

    async def _metadata(self, member: int) -> tuple[tuple[str, str], ...]:
        if self._user is None:
            return (_HAS_LEADER,)
        if self._token is None:
            request = get_message_class(AUTHENTICATE.request)(
                name=self._user.name, password=self._user.password
            )
            self._token = (await self._call_member(member, AUTHENTICATE, request, ATTEMPT_TIMEOUT_S)).token
        return (_HAS_LEADER, ("token", cast(str, self._token)))

    def _forget_token(self, text: str) -> bool:
        """Forget our token, and return True, if etcd's answer says that it knows it no more, after some minutes."""
        if "invalid auth token" not in text:
            return False
        self._token = None
        return True

    async def _read_within(self, call: _Call, timeout_s: float) -> AnyMessage:
        async with asyncio.timeout(timeout_s):
            return await call.read()

    def _explain(self, error: Exception, member: int, path: str) -> ResilientJaxError:
        if isinstance(error, grpc.aio.AioRpcError):
            return explain_etcd_error(error.code(), error.details() or "", self.endpoints[member], path)
        return self._closed(path)

    def _closed(self, path: str) -> PeerUnreachable:
        return PeerUnreachable(f"the connection to one of {', '.join(self.endpoints)} was closed ({path})")


def _make_options(server_name: str | None) -> GrpcOptions:
    if server_name is None:
        return _OPTIONS
    return [*_OPTIONS, ("grpc.ssl_target_name_override", server_name)]


async def _ask_for_progress(call: _Call, request: AnyMessage) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            await call.write(request)


def explain_etcd_error(code: grpc.StatusCode, details: str, endpoint: str, path: str) -> ResilientJaxError:
    """Return the error of ours for the status of a call; the texts are those of etcd 3.4 to 3.6."""
    for is_meant, make_error in _EXPLANATIONS:
        if is_meant(code, details):
            return make_error(f"{endpoint}: {details or code.name} ({path})")
    return InternalError(f"{path} at {endpoint} ended with {code.name}: {details}")


def _explain_space(text: str) -> ResilientJaxError:
    return OperatorError(
        f"etcd is out of space: {text}. Compact and defragment it (etcdctl compact, etcdctl defrag), then "
        "`etcdctl alarm disarm`; start it with --auto-compaction-mode=revision --auto-compaction-retention=10000"
    )


def _explain_refusal(text: str) -> ResilientJaxError:
    return Unauthenticated(
        f"etcd refused us: {text}. Set RESILIENT_JAX_ETCD_USER and RESILIENT_JAX_ETCD_PASSWORD to a user whose role "
        "may read and write the job's keys"
    )


def _explain_certificate(text: str) -> ResilientJaxError:
    return PeerUnreachable(
        f"etcd ended the TLS connection: {text}. It expects a client certificate that its authority signed, and one "
        "from us whose authority signed its own: see --store-tls"
    )


def _explain_unavailable(text: str) -> ResilientJaxError:
    return PeerUnreachable(text, is_refused=any(part in text for part in _NOT_SENT))


_UNAVAILABLE: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,  # gRPC's own, where a connection breaks in the middle of a write
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # too many requests
}
_REFUSALS: Final = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_EXPLANATIONS: Final[
    tuple[tuple[Callable[[grpc.StatusCode, str], bool], Callable[[str], ResilientJaxError]], ...]
] = (
    (lambda code, text: "lease not found" in text, LeaseExpired),
    (lambda code, text: "has been compacted" in text, CompactedRevision),
    (lambda code, text: "space exceeded" in text, _explain_space),
    (lambda code, text: "too large" in text or "too many operations" in text, CallerError),
    (lambda code, text: "TSI_" in text or "SSL_" in text, _explain_certificate),
    (
        lambda code, text: code in _REFUSALS or "user name is empty" in text or "authentication" in text,
        _explain_refusal,
    ),
    (lambda code, text: code in _UNAVAILABLE, _explain_unavailable),
)
"""From what etcd says to what we raise; the first that fits counts."""
