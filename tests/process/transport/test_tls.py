"""Mutual TLS: a peer without a certificate of the job's authority is refused."""

import asyncio
import contextlib
import dataclasses
import itertools

import msgspec
import pytest

from resilient_jax.errors import ConfigError, PeerUnreachable, Unauthenticated
from resilient_jax.transport import (
    Channel,
    Credentials,
    Method,
    PeerChannel,
    PeerServer,
    Server,
    TlsFiles,
    renewed_channel,
)
from resilient_jax.transport.peer_calls import CallService
from tests.support.authority import Authority
from tests.support.patience import patience

SERVICE = "test"
WAIT_S = patience(1)


class Number(msgspec.Struct):
    x: int


ECHO = Method("echo", Number, Number)


COUNT = Method("count", Number, Number, is_streaming=True)


async def echo(request):
    return request


async def count(request):
    for number in itertools.count():
        yield Number(number)
        await asyncio.sleep(0.05)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "job", "job")


def exchange(server_credentials, client_credentials):
    """Return the result of one call over a new server and channel, or raise its error."""

    async def main():
        server = Server(credentials=server_credentials)
        server.add(SERVICE, {ECHO: echo})
        async with server, Channel(server.address, client_credentials) as channel:
            return await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)

    return asyncio.run(main())


def test_peers_with_certificates_of_one_authority_communicate(authority):
    server, client = authority.sign("server"), authority.sign("client")
    assert exchange(Credentials("token", server), Credentials("token", client)) == Number(1)


def test_a_client_without_certificate_is_refused(authority):
    server, client = authority.sign("server"), authority.sign("client")
    with pytest.raises(PeerUnreachable):
        exchange(Credentials("token", server), Credentials("token"))
    # A client that trusts the job's authority, but whose own certificate is another authority's.
    stranger = Authority(authority.folder / "other", "other").sign("stranger")
    known = TlsFiles(stranger.certificate, stranger.key, client.authority)
    with pytest.raises(PeerUnreachable):
        exchange(Credentials("token", server), Credentials("token", known))


def test_a_client_refuses_a_server_of_another_authority(authority, tmp_path):
    server = Authority(tmp_path / "other", "other").sign("server")
    with pytest.raises(PeerUnreachable, match=r"(?i)handshake|certificate"):
        exchange(Credentials("token", server), Credentials("token", authority.sign("client")))


def test_a_certificate_does_not_replace_the_token(authority):
    server, client = authority.sign("server"), authority.sign("client")
    with pytest.raises(Unauthenticated):
        exchange(Credentials("token", server), Credentials("other", client))


def test_one_server_name_can_serve_every_host(authority):
    server = authority.sign("server", host="store.job")
    client = authority.sign("client")
    with pytest.raises(PeerUnreachable):
        exchange(Credentials("token", server), Credentials("token", client))
    named = TlsFiles(client.certificate, client.key, client.authority, server_name="store.job")
    assert exchange(Credentials("token", server), Credentials("token", named)) == Number(1)


def test_peer_sockets_use_tls(authority):
    credentials = Credentials("token", authority.sign("both"))
    service = CallService({ECHO: lambda request: request})
    server = PeerServer("127.0.0.1", credentials, {SERVICE: service}, name="rj-test")
    with contextlib.closing(server), PeerChannel(server.address, credentials, SERVICE) as channel:
        assert channel.call(ECHO, Number(2), timeout_s=WAIT_S) == Number(2)
        plain = PeerChannel(server.address, Credentials("token"), SERVICE)
        with plain, pytest.raises(PeerUnreachable):
            plain.call(ECHO, Number(2), timeout_s=WAIT_S)


@pytest.mark.parametrize("role", ["certificate", "key", "authority"])
def test_the_error_names_a_missing_or_wrong_file(authority, role):
    files = authority.sign("server")
    path = getattr(files, role)
    path.write_text("not a certificate")
    with pytest.raises(ConfigError, match=f"TLS {role} file {path} is not a PEM file"):
        Channel("127.0.0.1:1", Credentials("token", files))
    path.unlink()
    with pytest.raises(ConfigError, match=rf"TLS {role} file {path} cannot be read \(No such file"):
        asyncio.run(Server(credentials=Credentials("token", files)).start())


CERTIFICATE, KEY = (
    f"-----BEGIN {name}-----\nbm9uc2Vuc2U=\n-----END {name}-----\n" for name in ("CERTIFICATE", "PRIVATE KEY")
)


@pytest.mark.parametrize(
    ("role", "content", "words"),
    [
        ("certificate", CERTIFICATE, "is no valid PEM certificate"),
        ("authority", CERTIFICATE, "is no valid PEM certificate"),
        ("key", KEY, "is no valid PEM key without a password, or not that of"),
        ("key", None, "is no valid PEM key without a password, or not that of"),
    ],
    ids=["certificate", "authority", "key", "another's key"],
)
def test_the_error_names_a_damaged_tls_file(authority, tmp_path, role, content, words):
    good = authority.sign("server")
    bad = authority.sign("another").key
    if content is not None:
        bad = tmp_path / "bad.pem"
        bad.write_text(content)
    tls = dataclasses.replace(good, **{role: bad})
    with pytest.raises(ConfigError, match=f"cannot listen on .*: TLS {role} file {bad} {words}"):
        PeerServer("127.0.0.1", Credentials("token", tls), {}, name="rj-test")
    with pytest.raises(ConfigError, match=f"cannot listen on .*: TLS {role} file {bad} {words}"):
        asyncio.run(Server(credentials=Credentials("token", tls)).start())


def replace_files(files, by):
    """Write the contents of other files, as a tool that renews certificates does, one after the other."""
    for role in ("certificate", "key"):
        getattr(files, role).write_bytes(getattr(by, role).read_bytes())


def test_certificates_are_renewed_while_calls_and_streams_go_on(tmp_path):
    """First both authorities are trusted, then the certificates are new, then the old authority is forgotten."""
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    server_files, client_files = old.sign("server"), old.sign("client")
    stranger = old.sign("stranger")
    both = old.path.read_bytes() + new.path.read_bytes()

    async def main():
        server = Server(credentials=Credentials("token", server_files))
        server.add(SERVICE, {ECHO: echo, COUNT: count})
        credentials = Credentials("token", client_files)
        async with server, Channel(server.address, credentials) as channel:
            async with contextlib.aclosing(channel.stream(SERVICE, COUNT, Number(0))) as counting:
                assert await anext(counting) == Number(0)
                server_files.authority.write_bytes(both)  # the clients' file, too: they share it
                assert await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S) == Number(1)
                for files, name in ((server_files, "server"), (client_files, "client")):
                    renewed = new.sign(name)
                    files.certificate.write_bytes(renewed.certificate.read_bytes())
                    # In between key and certificate are no pair: what was read before is used.
                    assert await channel.call(SERVICE, ECHO, Number(2), timeout_s=WAIT_S) == Number(2)
                    async with Channel(server.address, credentials) as another:
                        if files is server_files:
                            await another.call(SERVICE, ECHO, Number(2), timeout_s=WAIT_S)
                    files.key.write_bytes(renewed.key.read_bytes())
                    assert await channel.call(SERVICE, ECHO, Number(3), timeout_s=WAIT_S) == Number(3)
                server_files.authority.write_bytes(new.path.read_bytes())
                assert await channel.call(SERVICE, ECHO, Number(4), timeout_s=WAIT_S) == Number(4)
                assert await anext(counting) == Number(1), "a connection that exists is kept"
            async with Channel(server.address, credentials) as fresh:
                assert await fresh.call(SERVICE, ECHO, Number(5), timeout_s=WAIT_S) == Number(5)
            known = TlsFiles(stranger.certificate, stranger.key, new.path)
            async with Channel(server.address, Credentials("token", known)) as refused:
                with pytest.raises(PeerUnreachable):
                    await refused.call(SERVICE, ECHO, Number(6), timeout_s=2.0)

    asyncio.run(main())


def test_a_stream_of_a_channel_that_was_replaced_ends_as_a_lost_connection(authority, monkeypatch):
    monkeypatch.setattr(renewed_channel, "RETIREMENT_S", 0.1)
    server_files, client_files = authority.sign("server"), authority.sign("client")

    async def main():
        server = Server(credentials=Credentials("token", server_files))
        server.add(SERVICE, {ECHO: echo, COUNT: count})
        async with server, Channel(server.address, Credentials("token", client_files)) as channel:
            counting = channel.stream(SERVICE, COUNT, Number(0))
            await anext(counting)
            waiting = asyncio.ensure_future(wait_for_end(counting))
            replace_files(client_files, authority.sign("another"))
            assert await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S) == Number(1)
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(PeerUnreachable):
                    await waiting

    asyncio.run(main())


async def wait_for_end(responses):
    async for _ in responses:
        pass
