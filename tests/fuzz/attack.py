"""An attack on a running job: messages to all ports on which its processes listen for each other.

Nothing of it may get an answer but a refusal: of a wrong token before anything else, and of a message that does not
decode, or makes no sense, as an error of ours. An internal error is a finding.
"""

import asyncio
import collections
import contextlib
import dataclasses
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterable

import grpc
import grpc.aio
import msgspec
import psutil

from resilient_jax.cluster import agent_messages, status_messages
from resilient_jax.cluster.agent_messages import READ_LOG, SEND_SIGNAL
from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.cluster.status_messages import WRITE
from resilient_jax.compile.program_exchange import FETCH_PROGRAM, PROGRAM_SERVICE, REPORT_CLAIM
from resilient_jax.errors import InternalError, MessageError, PeerUnreachable, Unauthenticated
from resilient_jax.protocol.framing import encode_frame
from resilient_jax.snapshot import messages as snapshot_messages
from resilient_jax.state.peer_transfer import DESCRIBE_PART, READ_PART, SERVICE
from resilient_jax.store import messages as store_messages
from resilient_jax.transport.call_proofs import (
    ASK_NONCE,
    INTRODUCE,
    NONCE_BYTES,
    AskNonce,
    CallSession,
    ServerNonce,
    Token,
)
from resilient_jax.transport.call_proofs import SERVICE as ADMISSION
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.method import Method, ReadMethod, decode, encode, format_method_path
from resilient_jax.transport.peer_calls import HEADER_DECODER, CallRefusal, PeerRequest
from resilient_jax.transport.peer_connection import OpenSockets, PeerConnector
from resilient_jax.transport.socket_io import receive_frame, send_all
from tests.fuzz.messages import RAW, draw_bytes, draw_struct, mutations
from tests.support.patience import patience

NUM_SLOW = 40
"""Connections that stay open, and send a byte now and then."""
NUM_AT_ONCE = 32
CALL_TIMEOUT_S = 0.3
REFUSAL_TIMEOUT_S = patience(2)
"""A wrong token is refused at once, but on a machine with other work at once may be later than the timeout above."""
RAW_SHARE, WRONG_TOKEN_SHARE, MUTATED_SHARE = 0.6, 0.1, 0.2
PROPER_ANSWERS = frozenset(
    {
        "OK",
        *(
            code.name
            for code in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        ),
    }
)
"""Of calls with the right token: some ask for what there is."""
LINGER_NONE = struct.pack("ii", 1, 0)
"""Close with a reset: a hundred thousand connections would use up the ports otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A method of a gRPC server, or of a peer socket.

    Attributes:
        address: of the server.
        path: of the method, as gRPC names it.
        request: the type of its requests.
        makes_sense: whether well-formed requests are sent with the right token; else only bytes that do not decode.
        is_peer: whether it is called through a peer socket.
    """

    address: str
    path: str
    request: type[msgspec.Struct]
    makes_sense: bool
    is_peer: bool = False


@dataclasses.dataclass(slots=True)
class Findings:
    """What was sent, and which answers were no refusal."""

    sent: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    answers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bad: list[str] = dataclasses.field(default_factory=list)


def list_targets(report: JobReport, store: str) -> list[Target]:
    """Return the methods of all servers of a job.

    A process with the token may write the store, and have an agent kill its worker: that is not tried.
    """
    peers: list[tuple[str, str, Iterable[Method | ReadMethod]]] = []
    services: list[tuple[str, str, Iterable[tuple[Method, bool]]]] = [
        (store, store_messages.SERVICE, [(m, False) for m in _methods_of(store_messages)])
    ]
    for host in report.hosts:
        services.append(
            (host.agent.endpoint, agent_messages.SERVICE, [(READ_LOG, True), (SEND_SIGNAL, False)])
        )
        # Statuses of hosts that do not exist, or replace none that does.
        services.append((host.agent.endpoint, status_messages.SERVICE, [(WRITE, True)]))
        if host.worker is not None and host.worker.report.endpoint:
            endpoint = host.worker.report.endpoint
            peers.append((endpoint, SERVICE, (DESCRIBE_PART, READ_PART)))
            peers.append((endpoint, PROGRAM_SERVICE, (FETCH_PROGRAM, REPORT_CLAIM)))
        if host.snapshot_server is not None:
            methods = [*_methods_of(snapshot_messages), snapshot_messages.READ]
            peers.append((host.snapshot_server.endpoint, snapshot_messages.SERVICE, methods))
    services += [
        (address, ADMISSION, [(INTRODUCE, True)]) for address in {address for address, _, _ in services}
    ]
    return [
        Target(address, format_method_path(service, method), method.request, sense)
        for address, service, methods in services
        for method, sense in methods
    ] + [
        Target(address, f"/{service}/{method.name}", method.request, makes_sense=True, is_peer=True)
        for address, service, methods in peers
        for method in methods
    ]


def _methods_of(module: object) -> list[Method]:
    return [value for value in vars(module).values() if isinstance(value, Method)]


def list_ports(report: JobReport, store: str) -> list[tuple[str, int]]:
    """Return where agents and snapshot servers listen, and where workers serve their state."""
    host, _, port = store.rpartition(":")
    found = {(host, int(port))}
    for status in report.hosts:
        pids = [status.agent.pid, *find_pids(report, JobComponent.SNAPSHOT_SERVER, status.host)]
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.add((connection.laddr.ip, connection.laddr.port))
        if status.worker is not None and status.worker.report.endpoint:
            host, _, port = status.worker.report.endpoint.rpartition(":")
            found.add((host, int(port)))
    return sorted(found)


async def attack(report: JobReport, store: str, token: str, messages: int, seed: int) -> Findings:
    """Send so many messages, and return what was found."""
    draw = random.Random(seed)
    findings = Findings()
    ports, targets = list_ports(report, store), list_targets(report, store)
    channels = {
        target.address: grpc.aio.insecure_channel(target.address) for target in targets if not target.is_peer
    }
    slow = [asyncio.create_task(_trickle(draw.choice(ports), draw)) for _ in range(NUM_SLOW)]
    left = iter(range(messages))
    try:
        async with asyncio.TaskGroup() as senders:
            for _ in range(NUM_AT_ONCE):
                senders.create_task(_send_all(left, draw, ports, targets, channels, token, findings))
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        for channel in channels.values():
            await channel.close()
    return findings


async def _send_all(left, draw, ports, targets, channels, token, findings) -> None:
    for _ in left:
        if draw.random() < RAW_SHARE:
            make = draw.choice(RAW)
            findings.sent[make.__name__] += 1
            await _send_raw(draw.choice(ports), make(draw))
            continue
        target = draw.choice(targets)
        kind, data, given = _choose_call(draw, target, token)
        findings.sent[kind] += 1
        timeout_s = CALL_TIMEOUT_S if given == token else REFUSAL_TIMEOUT_S
        if target.is_peer:
            code, details = await asyncio.to_thread(_call_peer, target, data, given, timeout_s)
        else:
            code, details = await _call(channels[target.address], target.path, data, given, timeout_s)
        findings.answers[f"{kind}: {code}"] += 1
        is_refused = code == grpc.StatusCode.UNAUTHENTICATED.name
        if given != token and not is_refused and code != grpc.StatusCode.UNAVAILABLE.name:
            findings.bad.append(f"{target.path} with a wrong token: {code} {details}")
        elif code not in PROPER_ANSWERS or "Traceback" in details:
            findings.bad.append(f"{target.path} with {kind} {data[:200]!r}: {code} {details}")


def _choose_call(draw: random.Random, target: Target, token: str) -> tuple[str, bytes, str]:
    valid = msgspec.msgpack.encode(draw_struct(draw, target.request))
    share = draw.random()
    if share < WRONG_TOKEN_SHARE / (1 - RAW_SHARE):
        return "wrong token", valid, draw.choice(("", "x", token[:-1], token + "x", token.upper() + "x"))
    if share < MUTATED_SHARE / (1 - RAW_SHARE):
        return "mutated", next(mutations(draw, valid)) if target.makes_sense else draw_bytes(draw), token
    return ("senseless", valid, token) if target.makes_sense else ("random", draw_bytes(draw), token)


async def _call(
    channel: grpc.aio.Channel, path: str, data: bytes, token: str, timeout_s: float
) -> tuple[str, str]:
    call = None
    try:
        metadata = await _sign(channel, path, data, token) if token else ()
        call = channel.unary_stream(path)(data, timeout=timeout_s, metadata=metadata)
        async for _ in call:
            break
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    finally:
        if call is not None:
            call.cancel()
    return "OK", ""


def _call_peer(target: Target, data: bytes, token: str, timeout_s: float) -> tuple[str, str]:
    """Return the answer of a peer socket, by gRPC's words for what it is."""
    _, service, method = target.path.split("/")
    sockets, deadline_s = OpenSockets("the attack"), time.monotonic() + timeout_s
    try:
        connector = PeerConnector(target.address, Credentials(token or "none"), service)
        connection = connector.connect(time.monotonic() + REFUSAL_TIMEOUT_S, sockets)
    except Unauthenticated as error:
        return grpc.StatusCode.UNAUTHENTICATED.name, str(error)
    except (PeerUnreachable, MessageError) as error:
        return grpc.StatusCode.UNAVAILABLE.name, str(error)
    try:
        send_all(connection, encode_frame(encode(PeerRequest(method, msgspec.Raw(data)))), deadline_s)
        header = HEADER_DECODER.decode(receive_frame(connection, deadline_s))
    except (OSError, EOFError) as error:  # it is no request, and the connection is closed
        return grpc.StatusCode.UNAVAILABLE.name, str(error)
    finally:
        sockets.close(connection)
    if not isinstance(header, CallRefusal):
        return "OK", ""
    is_internal = header.error == InternalError.__name__
    code = grpc.StatusCode.INTERNAL if is_internal else grpc.StatusCode.FAILED_PRECONDITION
    return code.name, header.message


async def _sign(
    channel: grpc.aio.Channel, path: str, data: bytes, token: str
) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call in a session of its own, as a client has it that does not ask for proofs."""
    asked = format_method_path(ADMISSION, ASK_NONCE)
    answer = await channel.unary_unary(asked)(encode(AskNonce()), timeout=REFUSAL_TIMEOUT_S)
    nonce = decode(answer, ServerNonce, asked).nonce
    _, metadata = CallSession(Token(token), secrets.token_bytes(NONCE_BYTES), nonce).sign_call(path, data)
    return metadata


async def _send_raw(where: tuple[str, int], data: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await loop.sock_connect(connection, where)
                await loop.sock_sendall(connection, data)
                await asyncio.sleep(0)


async def _trickle(where: tuple[str, int], draw: random.Random) -> None:
    """Send a byte in a while on a connection that stays open; open another when it is closed."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*where)
            started_s = time.monotonic()
            try:
                while time.monotonic() - started_s < 60:
                    writer.write(draw.randbytes(1))
                    await writer.drain()
                    await asyncio.sleep(0.2)
            finally:
                writer.close()
        await asyncio.sleep(0.2)
