"""The asyncio transport over real sockets: authentication, messages, errors."""

import asyncio
import contextlib
import os
import time

import grpc
import grpc.aio
import msgspec
import pytest

from resilient_jax import errors
from resilient_jax.errors import (
    AddressInUse,
    ConfigError,
    InternalError,
    MessageError,
    OperatorError,
    PeerUnreachable,
    Unauthenticated,
)
from resilient_jax.events import EventKind
from resilient_jax.transport import Channel, Credentials, Method, Server
from resilient_jax.transport.client_sessions import ClientSessions
from tests.support.open_descriptors import count_descriptors, wait_for_descriptors
from tests.support.patience import NEVER_S, patience

CREDENTIALS = Credentials("test-token")
SERVICE = "test"
WAIT_S = patience(1)


class Number(msgspec.Struct):
    x: int


class Text(msgspec.Struct):
    x: str


class Blob(msgspec.Struct):
    data: bytes


ECHO = Method("echo", Number, Number)
COUNT = Method("count", Number, Number, is_streaming=True)
BLOB = Method("blob", Blob, Blob)


async def echo(request):
    return request


async def count(request):
    for x in range(request.x):
        yield Number(x)


@contextlib.asynccontextmanager
async def serving(handlers, *, on_event=None, credentials=CREDENTIALS):
    server = Server(credentials=credentials, on_event=on_event)
    server.add(SERVICE, handlers)
    async with server, Channel(server.address, credentials) as channel:
        yield server, channel


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(6)):
            await main()

    asyncio.run(bounded())


async def raw_call(server, data, token):
    """Send bytes as a foreign gRPC client would, with proofs of a token or without."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        metadata = None
        if token:
            session = await ClientSessions(server.address, token).get(channel, WAIT_S)
            _, metadata = session.sign_call(f"/{SERVICE}/echo", data)
        await channel.unary_unary(f"/{SERVICE}/echo")(data, metadata=metadata, timeout=WAIT_S)


def test_a_request_is_answered():
    async def main():
        async with serving({ECHO: echo, COUNT: count}) as (_, channel):
            assert await channel.call(SERVICE, ECHO, Number(7), timeout_s=WAIT_S) == Number(7)
            stream = channel.stream(SERVICE, COUNT, Number(3))
            assert [item.x async for item in stream] == [0, 1, 2]

    run(main)


def test_a_wrong_token_is_refused_and_reported_once():
    async def main():
        seen, served, texts = [], [], set()

        async def handler(request):
            served.append(request)
            return request

        async def stream_handler(request):
            served.append(request)
            yield request

        report = lambda kind, detail: seen.append((kind, detail))  # noqa: E731
        async with serving({ECHO: handler, COUNT: stream_handler}, on_event=report) as (server, good):
            for _ in range(2):  # two connections of one peer: the same address, different ports
                async with Channel(server.address, Credentials("wrong")) as channel:
                    for _ in range(3):
                        with pytest.raises(Unauthenticated) as refused:
                            await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
                        texts.add(str(refused.value))
                    with pytest.raises(Unauthenticated):
                        await anext(channel.stream(SERVICE, COUNT, Number(1)))
            assert not served
            assert await good.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S) == Number(1)
        expected = {
            "peer": "127.0.0.1",
            "method": "/rj.admission/introduce",
            "reason": "token: the proof of it is wrong",
        }
        assert seen == [(EventKind.REQUEST_UNAUTHENTICATED, expected)]
        assert texts == {
            f"{server.address} refused our job token for /test/echo: the proof of it is wrong. "
            "Every process of a job must be given the same token"
        }

    run(main)


def test_a_missing_token_is_refused():
    async def main():
        async with serving({ECHO: echo}) as (server, _):
            with pytest.raises(grpc.aio.AioRpcError, match=r"a proof of it is missing") as refused:
                await raw_call(server, msgspec.msgpack.encode(Number(1)), None)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(main)


def test_a_refusal_reveals_nothing_about_the_token():
    assert "test-token" not in repr(CREDENTIALS)


def test_a_request_that_does_not_decode_names_method_and_field():
    async def main():
        seen = []
        report = lambda kind, detail: seen.append(kind)  # noqa: E731
        async with serving({ECHO: echo}, on_event=report) as (_, channel):
            wrong = Method("echo", Text, Number)
            for _ in range(2):
                with pytest.raises(MessageError) as refused:
                    await channel.call(SERVICE, wrong, Text("seven"), timeout_s=WAIT_S)
                text = str(refused.value)
                assert "request of /test/echo from ipv4:127.0.0.1" in text
                assert "does not decode as Number: Expected `int`, got `str` - at `$.x`" in text
        assert seen == [EventKind.REQUEST_MALFORMED]

    run(main)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa1x", b"\x80", b"\x81\xa1\xff\x01", b"\x93" * 1000])
def test_bytes_that_are_no_message_are_refused(data):
    async def main():
        async with serving({ECHO: echo}) as (server, _):
            with pytest.raises(grpc.aio.AioRpcError, match=r"does not decode as Number") as refused:
                await raw_call(server, data, "test-token")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(main)


def test_a_response_that_does_not_decode_names_method_and_field():
    async def main():
        async def answer_text(request):
            return Text("seven")

        async def stream_text(request):
            yield Text("seven")

        async with serving({ECHO: answer_text, COUNT: stream_text}) as (_, channel):
            pattern = r"response to /test/echo from 127.0.0.1:\d+ does not decode as Number: .* `\$.x`"
            with pytest.raises(MessageError, match=pattern):
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
            with pytest.raises(MessageError, match=r"response to /test/count .* `\$.x`"):
                await anext(channel.stream(SERVICE, COUNT, Number(1)))

    run(main)


def test_an_unknown_method_is_refused_by_name():
    async def main():
        async with serving({}) as (_, channel):
            with pytest.raises(MessageError, match=r"does not serve /test/echo"):
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)

    run(main)


def test_a_deadline_is_honored_on_both_sides():
    async def main():
        cancelled = asyncio.Event()

        async def hang(request):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with serving({ECHO: hang}) as (server, channel):
            started_s = time.monotonic()
            with pytest.raises(PeerUnreachable) as late:
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=0.2)
            assert time.monotonic() - started_s > 0.1
            assert str(late.value) == f"{server.address} did not answer /test/echo within 0.2 s"
            assert not late.value.is_refused
            async with asyncio.timeout(WAIT_S):
                await cancelled.wait()

    run(main)


def test_a_closed_stream_ends_its_handler():
    async def main():
        ended = asyncio.Event()

        async def endless(request):
            try:
                yield request
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with serving({COUNT: endless}) as (_, channel):
            async with contextlib.aclosing(channel.stream(SERVICE, COUNT, Number(1))) as stream:
                assert await anext(stream) == Number(1)
            async with asyncio.timeout(WAIT_S):
                await ended.wait()

    run(main)


OUR_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type)
    and issubclass(value, errors.ResilientJaxError)
    and value is not Unauthenticated
]


@pytest.mark.parametrize("error_class", OUR_ERRORS, ids=lambda error_class: error_class.__name__)
def test_an_error_of_this_package_keeps_its_class(error_class):
    async def main():
        async def fail(request):
            raise error_class("host-2 läßt grüßen")

        async def fail_later(request):
            yield Number(0)
            raise error_class("host-2 läßt grüßen")

        async with serving({ECHO: fail, COUNT: fail_later}) as (_, channel):
            with pytest.raises(error_class, match=r"^host-2 läßt grüßen$") as failed:
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
            assert type(failed.value) is error_class
            stream = channel.stream(SERVICE, COUNT, Number(1))
            assert await anext(stream) == Number(0)
            with pytest.raises(error_class, match=r"^host-2 läßt grüßen$"):
                await anext(stream)

    run(main)


@pytest.mark.parametrize("character", ["x", "%", "ü", "🙂", "\udcff"])
def test_a_very_long_error_still_arrives(character):
    async def main():
        async def fail(request):
            raise ConfigError(character * 100_000)

        async with serving({ECHO: fail}) as (_, channel):
            for _ in range(20):  # whether gRPC refuses a message that is slightly too large is random
                with pytest.raises(ConfigError, match=r" \.\.\.$"):
                    await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)

    run(main)


def test_a_bug_in_a_handler_arrives_as_an_internal_error_and_is_logged(caplog):
    async def main():
        async def fail(request):
            return 1 // 0

        async with serving({ECHO: fail}) as (_, channel):
            with pytest.raises(
                InternalError, match=r"/test/echo failed: ZeroDivisionError: integer division"
            ):
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)

    run(main)
    (record,) = [record for record in caplog.records if record.name.startswith("resilient_jax")]
    assert record.getMessage() == "/test/echo failed"
    assert record.exc_info


def test_messages_of_8_mib_pass_and_of_17_are_refused():
    async def main():
        async with serving({BLOB: echo}) as (_, channel):
            blob = Blob(os.urandom(8 * 1024 * 1024))
            assert await channel.call(SERVICE, BLOB, blob, timeout_s=WAIT_S) == blob
            with pytest.raises(MessageError, match=r"/test/blob .* too large .at most 16777216 bytes"):
                await channel.call(SERVICE, BLOB, Blob(bytes(17 * 1024 * 1024)), timeout_s=WAIT_S)

    run(main)


def test_the_error_names_an_address_in_use():
    async def main():
        async with serving({}) as (server, _):
            second = Server(server.address, credentials=CREDENTIALS)
            with pytest.raises(AddressInUse) as in_use:
                await second.start()
            port = server.address.rpartition(":")[2]
            assert str(in_use.value) == (
                f"cannot listen on {server.address}: another process does. Choose another port, "
                f"or end that process (`ss -ltnp 'sport = :{port}'` names it)"
            )

    run(main)


def test_a_port_can_be_reused_at_once():
    async def main():
        async with serving({ECHO: echo}) as (server, channel):
            await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
        again = Server(server.address, credentials=CREDENTIALS)
        again.add(SERVICE, {ECHO: echo})
        async with again, Channel(again.address, CREDENTIALS) as channel:
            assert await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S) == Number(1)

    run(main)


@pytest.mark.parametrize(
    "address", ["", "localhost", "127.0.0.1:", ":7000", "127.0.0.1:x", "127.0.0.1:70000"]
)
def test_an_address_of_the_wrong_form_is_refused(address):
    async def main():
        with pytest.raises(ConfigError, match=f"expected an address like 127.0.0.1:7000, found '{address}'"):
            await Server(address, credentials=CREDENTIALS).start()

    run(main)


def test_an_address_of_another_machine_is_refused_with_the_reason():
    async def main():
        with pytest.raises(OperatorError, match=r"cannot listen on 192.0.2.1:7000: Cannot assign requested"):
            await Server("192.0.2.1:7000", credentials=CREDENTIALS).start()

    run(main)


async def unreachable(channel):
    with pytest.raises(PeerUnreachable) as failure:
        await channel.call(SERVICE, ECHO, Number(1), timeout_s=NEVER_S)
    return failure.value


def test_a_stopped_server_refuses_at_once_and_is_reached_again_after_a_restart():
    async def main():
        async with serving({ECHO: echo}) as (server, channel):
            await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
            await server.stop()
            gone = await unreachable(channel)
            if not gone.is_refused:  # the call found the old connection broken
                assert str(gone).startswith(f"{server.address} cannot be reached for /test/echo: ")
                gone = await unreachable(channel)
            assert gone.is_refused
            assert str(gone) == (
                f"{server.address} refused the connection for /test/echo: no process listens there"
            )
            again = Server(server.address, credentials=CREDENTIALS)
            again.add(SERVICE, {ECHO: echo})
            async with again:
                while True:
                    with contextlib.suppress(PeerUnreachable):
                        await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
                        break
                    await asyncio.sleep(0.01)

    run(main)


def test_closing_a_channel_does_not_cancel_its_callers():
    async def main():
        async def hang(request):
            await asyncio.Event().wait()

        async with serving({ECHO: hang}) as (_, channel):
            call = asyncio.ensure_future(channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S))
            await asyncio.sleep(0.05)
            await channel.close()
            with pytest.raises(PeerUnreachable, match=r"our channel to it"):
                await call
            with pytest.raises(PeerUnreachable, match=r"our channel to it"):
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
            with pytest.raises(PeerUnreachable, match=r"our channel to it"):
                await anext(channel.stream(SERVICE, COUNT, Number(1)))

    run(main)


def test_a_cancelled_caller_is_cancelled():
    async def main():
        async def hang(request):
            await asyncio.Event().wait()

        async with serving({ECHO: hang}) as (_, channel):
            call = asyncio.ensure_future(channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    run(main)


def test_no_descriptor_leaks():
    async def main():
        async def once():
            async with serving({ECHO: echo, COUNT: count}) as (_, channel):
                await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)
                async with contextlib.aclosing(channel.stream(SERVICE, COUNT, Number(9))) as stream:
                    await anext(stream)

        await once()  # gRPC's own descriptors are opened once per process
        before = count_descriptors()
        for _ in range(10):
            await once()
        await wait_for_descriptors(before)

    run(main)


@pytest.mark.parametrize("token", ["", " padded", "padded ", "line\nbreak", "ключ"])
def test_a_token_that_metadata_cannot_carry_is_refused(token):
    with pytest.raises(ConfigError, match=r"job token") as refused:
        Credentials(token)
    assert not token or token not in str(refused.value)
