"""An impostor, at an address that somebody has put into a record: it gets no token, and no answer of it is believed."""

import asyncio
import contextlib
import socket
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import psutil
import pytest

from resilient_jax.errors import PeerError, Unauthenticated
from resilient_jax.transport import Channel, Credentials, Method, Server, call_proofs
from resilient_jax.transport.client_sessions import ClientSessions
from resilient_jax.transport.method import ByteStreamMethod
from tests.support.authority import Authority
from tests.support.patience import patience

TOKEN = "the-token-of-this-job"
WAIT_S = patience(2)
SERVICE = "test"


class Number(msgspec.Struct):
    x: int


ECHO = Method("echo", Number, Number)
COUNT = Method("count", Number, Number, is_streaming=True)
BYTES = ByteStreamMethod("bytes", Number)

NOT_BELIEVED = (PeerError, Unauthenticated)
ANSWERS = {
    "nothing": None,
    "an empty message": b"",
    "a number": msgspec.msgpack.encode(Number(666)),
    "a nonce": msgspec.msgpack.encode({"nonce": b"\0" * 16, "proof": b"\0" * 32}),
}


class Impostor(grpc.GenericRpcHandler):
    """Serves every method: it answers each message with the same bytes, and keeps all that it receives."""

    def __init__(self, answer: bytes | None) -> None:
        self.received: list[bytes] = []
        self.paths: list[str] = []
        self._answer = answer

    def service(self, handler_call_details):
        self.paths.append(handler_call_details.method)
        self.received.append(handler_call_details.method.encode())
        for key, value in handler_call_details.invocation_metadata:
            self.received += [key.encode(), value if isinstance(value, bytes) else value.encode()]

        async def serve(messages, context):
            async for data in messages:
                self.received.append(data)
                if self._answer is not None:
                    yield self._answer

        return grpc.stream_stream_rpc_method_handler(serve)


@contextlib.asynccontextmanager
async def impostor(answer, tls=None, port=0):
    handler = Impostor(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    if tls is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        key_and_chain = [(tls.key.read_bytes(), tls.certificate.read_bytes())]
        credentials = grpc.ssl_server_credentials(key_and_chain, tls.authority.read_bytes(), True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def make_all_calls(channel):
    """Make a call of each kind, none of which may succeed."""
    with pytest.raises(NOT_BELIEVED):
        await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
    with pytest.raises(NOT_BELIEVED):
        await anext(channel.stream(SERVICE, COUNT, Number(1), timeout_s=WAIT_S))
    with pytest.raises(NOT_BELIEVED):
        async with channel.open_byte_stream(SERVICE, BYTES, Number(1)):
            raise AssertionError("it is open")


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(20)):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_impostor_never_sees_the_token_and_is_not_believed(tmp_path: Path, answer, is_encrypted) -> None:
    """With `tls` it even has a certificate of the job's authority."""
    tls = Authority(tmp_path / "job", "job").sign("stolen") if is_encrypted else None

    async def main():
        async with (
            impostor(answer, tls) as (handler, address),
            Channel(address, Credentials(TOKEN, tls)) as channel,
        ):
            await make_all_calls(channel)
        assert handler.received, "it was called"
        everything = b"\n".join(handler.received)
        assert TOKEN.encode() not in everything
        assert not any(SERVICE in path for path in handler.paths), "and it gets no request"

    run(main)


async def echo(request):
    return request


async def count(request):
    for number in range(request.x):
        yield Number(number)


async def send_back(request, stream):
    while data := await stream.read():
        await stream.write(data)


def make_server(address="127.0.0.1:0"):
    server = Server(address, credentials=Credentials(TOKEN))
    server.add(SERVICE, {ECHO: echo, COUNT: count})
    server.add_byte_stream(SERVICE, BYTES, send_back)
    return server


async def use(channel):
    """Make a call of each kind, all of which succeed."""
    assert await channel.call(SERVICE, ECHO, Number(7), timeout_s=WAIT_S) == Number(7)
    assert [item.x async for item in channel.stream(SERVICE, COUNT, Number(2))] == [0, 1]
    async with channel.open_byte_stream(SERVICE, BYTES, Number(1)) as stream:
        assert await stream.write(b"hello")
        assert await stream.read() == b"hello"


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_who_takes_the_port_of_a_server_that_has_proved_itself_is_not_believed(answer) -> None:
    async def main():
        server = make_server()
        await server.start()
        async with Channel(server.address, Credentials(TOKEN)) as channel:
            await use(channel)
            await server.stop()
            port = int(server.address.rpartition(":")[2])
            async with impostor(answer, port=port) as (handler, _):
                await make_all_calls(channel)
            assert TOKEN.encode() not in b"\n".join(handler.received)
            async with make_server(server.address):
                await use(channel)

    run(main)


def test_a_call_that_was_overheard_cannot_be_made_again() -> None:
    served = []

    async def handler(request):
        served.append(request.x)
        return request

    async def main():
        server = Server(credentials=Credentials(TOKEN))
        server.add(SERVICE, {ECHO: handler})
        async with server, grpc.aio.insecure_channel(server.address) as raw:
            sessions = ClientSessions(server.address, TOKEN)
            session = await sessions.get(raw, WAIT_S)
            path, data = f"/{SERVICE}/echo", msgspec.msgpack.encode(Number(1))
            _, metadata = session.sign_call(path, data)
            other = msgspec.msgpack.encode(Number(2))
            refused = []
            for sent in (other, data, data):
                try:
                    await raw.unary_unary(path)(sent, metadata=metadata, timeout=WAIT_S)
                except grpc.aio.AioRpcError as error:
                    refused.append(error.code())
            assert served == [1]
            assert refused == [grpc.StatusCode.UNAUTHENTICATED] * 2

    run(main)


def test_a_server_that_begins_new_sessions_serves_all_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_proofs, "MAX_SESSIONS", 2)

    async def main():
        async with make_server() as server, contextlib.AsyncExitStack() as stack:
            channels = [Channel(server.address, Credentials(TOKEN)) for _ in range(5)]
            for channel in channels:
                await stack.enter_async_context(channel)
            for channel in [*channels, *channels]:
                await use(channel)

    run(main)


def test_a_server_proves_itself_only_at_an_address_of_its_machine() -> None:
    """Else an impostor elsewhere could pass on its proofs; 192.0.2.1 is nobody's (RFC 5737)."""

    async def main():
        async with make_server() as server, grpc.aio.insecure_channel(server.address) as raw:
            port = server.address.rpartition(":")[2]
            for address in (f"192.0.2.1:{port}", "192.0.2.1:1", "no-address", "no.such.host.invalid:1"):
                with pytest.raises(grpc.aio.AioRpcError, match="no address of its machine"):
                    await ClientSessions(address, TOKEN).get(raw, WAIT_S)
            for address in (server.address, f"localhost:{port}", "localhost:1"):
                await ClientSessions(address, TOKEN).get(raw, WAIT_S)
            own = f"{find_own_address()}:{port}"
            await ClientSessions(own, TOKEN).get(raw, WAIT_S)

    run(main)


def find_own_address() -> str:
    """Return an address of this machine in its network, or on loopback if it has none."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family is socket.AF_INET
    ]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")
