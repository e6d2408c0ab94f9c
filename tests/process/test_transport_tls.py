"""Mutual TLS: whoever shows no certificate of the job's authority is not let in."""

import asyncio
import datetime
import ipaddress

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from resilient_jax.errors import ConfigError, PeerUnreachable, TokenRefused
from resilient_jax.transport import Channel, Credentials, Method, Server, SyncChannel, ThreadServer, TlsFiles

SERVICE = "test"
WAIT_S = 10.0


class Number(msgspec.Struct):
    x: int


ECHO = Method("echo", Number, Number)


async def echo(request):
    return request


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        folder.mkdir()
        self.key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._build(subject, subject, self.key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = certificate.sign(self.key, hashes.SHA256())
        self.path = self._write("authority.pem", self.certificate)

    def sign(self, name, host="127.0.0.1"):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        try:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        except ValueError:
            names = x509.SubjectAlternativeName([x509.DNSName(host)])
        certificate = (
            self._build(subject, self.certificate.subject, key)
            .add_extension(names, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        key_path = self.folder / f"{name}.key"
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return TlsFiles(self._write(f"{name}.pem", certificate), key_path, self.path)

    def _build(self, subject, issuer, key):
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def _write(self, name, certificate):
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "job", "job")


def exchange(server_credentials, client_credentials):
    """What one call over a fresh server and channel gives or raises."""

    async def main():
        server = Server(credentials=server_credentials)
        server.add(SERVICE, {ECHO: echo})
        async with server, Channel(server.address, client_credentials) as channel:
            return await channel.call(SERVICE, ECHO, Number(1), timeout_s=WAIT_S)

    return asyncio.run(main())


def test_peers_with_certificates_of_one_authority_talk(authority):
    server, client = authority.sign("server"), authority.sign("client")
    assert exchange(Credentials("token", server), Credentials("token", client)) == Number(1)


def test_a_client_without_certificate_is_refused(authority):
    server, client = authority.sign("server"), authority.sign("client")
    with pytest.raises(PeerUnreachable):
        exchange(Credentials("token", server), Credentials("token"))
    # one that knows the authority and shows nothing of its own, as a stranger would
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
    with pytest.raises(TokenRefused):
        exchange(Credentials("token", server), Credentials("other", client))


def test_one_server_name_may_stand_for_every_host(authority):
    server = authority.sign("server", host="store.job")
    client = authority.sign("client")
    with pytest.raises(PeerUnreachable):
        exchange(Credentials("token", server), Credentials("token", client))
    named = TlsFiles(client.certificate, client.key, client.authority, server_name="store.job")
    assert exchange(Credentials("token", server), Credentials("token", named)) == Number(1)


def test_threads_use_it_too(authority):
    credentials = Credentials("token", authority.sign("both"))
    server = ThreadServer(credentials=credentials)
    server.add(SERVICE, {ECHO: lambda request: request})
    with server, SyncChannel(server.address, credentials) as channel:
        assert channel.call(SERVICE, ECHO, Number(2), timeout_s=WAIT_S) == Number(2)
        with SyncChannel(server.address, Credentials("token")) as plain, pytest.raises(PeerUnreachable):
            plain.call(SERVICE, ECHO, Number(2), timeout_s=WAIT_S)


@pytest.mark.parametrize("role", ["certificate", "key", "authority"])
def test_a_missing_or_wrong_file_is_named(authority, role):
    files = authority.sign("server")
    path = getattr(files, role)
    path.write_text("not a certificate")
    with pytest.raises(ConfigError, match=f"TLS {role} file {path} is not a PEM file"):
        Channel("127.0.0.1:1", Credentials("token", files))
    path.unlink()
    with pytest.raises(ConfigError, match=rf"TLS {role} file {path} cannot be read \(No such file"):
        asyncio.run(Server(credentials=Credentials("token", files)).start())
