"""Credentials of a job: its token, and TLS certificates where they are configured."""

import contextlib
import dataclasses
import ipaddress
import ssl
from pathlib import Path
from typing import Self

import grpc

from resilient_jax.errors import ConfigError

TOKEN_VARIABLE = "RESILIENT_JAX_TOKEN"
"""Environment variable with the job's token: never on a command line, which others can read."""
MISSING_TOKEN = (
    f"environment variable {TOKEN_VARIABLE}: found nothing, expected the job's token; set the same "
    "secret on all hosts, for example from `openssl rand -hex 16`"
)
"""The text of the error where it has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for mutual TLS: both sides present a certificate signed by `authority`.

    Attributes:
        certificate: this process's certificate chain.
        authority: the certificate of the authority that signed the certificates of all processes.
        server_name: name in the servers' certificates; None: the host of their address.
    """

    certificate: Path
    key: Path
    authority: Path
    server_name: str | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Return the files cert.pem, key.pem and ca.pem of a folder."""
        return cls(certificate=folder / "cert.pem", key=folder / "key.pem", authority=folder / "ca.pem")


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """What a process presents to its peers and requires of them.

    Attributes:
        token: the job's shared secret, not empty. The token is not sent: processes prove to each other that they have
            the token. Who reads a proof can try tokens one by one, so the token must not be one that can be guessed.
            Without TLS a token gives no protection against an attacker who can read the network, or change what is
            sent.
        tls: files for TLS; None for plain TCP.
    """

    token: str = dataclasses.field(repr=False)
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if not self.token or not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError(
                "the job token must be printable ASCII and not empty; "
                f"found {len(self.token)} characters that are not. Create one with `openssl rand -hex 16`"
            )
        if self.token != self.token.strip():
            raise ConfigError("the job token begins or ends with white space; remove it")

    @classmethod
    def from_paths(cls, token: str, tls_paths: tuple[str, str, str] | None) -> Self:
        """Return the credentials that another process passed on by `tls_paths`."""
        if tls_paths is None:
            return cls(token)
        certificate, key, authority = map(Path, tls_paths)
        return cls(token, TlsFiles(certificate=certificate, key=key, authority=authority))

    @property
    def tls_paths(self) -> tuple[str, str, str] | None:
        """The paths of certificate, key and authority, for a child process; None for plain TCP."""
        tls = self.tls
        return None if tls is None else (str(tls.certificate), str(tls.key), str(tls.authority))


def certificate_configuration(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Return what gRPC's servers take for a new connection.

    Raises:
        ConfigError: a file is missing or unreadable; the message names the file.
    """
    return grpc.ssl_server_certificate_configuration(
        [(_read_pem(tls.key, "key"), _read_pem(tls.certificate, "certificate"))],
        root_certificates=_read_pem(tls.authority, "authority"),
    )


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Return gRPC's credentials for a client.

    Raises:
        ConfigError: a file is missing or unreadable; the message names the file.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=_read_pem(tls.authority, "authority"),
        private_key=_read_pem(tls.key, "key"),
        certificate_chain=_read_pem(tls.certificate, "certificate"),
    )


def make_server_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server that refuses clients without a certificate.

    Raises:
        ConfigError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, tls)
    return context


def make_client_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the context of a client that checks the server's certificate and name.

    Raises:
        ConfigError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, tls)
    return context


def _load(context: ssl.SSLContext, tls: TlsFiles) -> None:
    check_pem_files(tls)
    context.load_cert_chain(tls.certificate, tls.key)
    context.load_verify_locations(tls.authority)


def check_pem_files(tls: TlsFiles) -> None:
    """Check that every file can be read.

    Raises:
        ConfigError: a file is missing or unreadable; the message names the file.
    """
    for path, role in ((tls.key, "key"), (tls.certificate, "certificate"), (tls.authority, "authority")):
        _read_pem(path, role)


def find_damaged_file(tls: TlsFiles) -> str | None:
    """Return which file OpenSSL cannot use, and why, which gRPC hides; None if it can use all of them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for role, path in (("certificate", tls.certificate), ("authority", tls.authority)):
        try:
            context.load_verify_locations(path)
        except OSError as error:
            return f"TLS {role} file {path} is no valid PEM certificate ({error}). Copy or create it again"
    try:
        context.load_cert_chain(tls.certificate, tls.key, password="")  # None would prompt at the terminal
    except OSError as error:
        return (
            f"TLS key file {tls.key} is no valid PEM key without a password, or not that of {tls.certificate} "
            f"({error}). Copy or create it again"
        )
    return None


def _read_pem(path: Path, role: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"TLS {role} file {path} cannot be read ({error.strerror}); expected a PEM file"
        ) from error
    if b"-----BEGIN" not in content:
        raise ConfigError(f"TLS {role} file {path} is not a PEM file: it has no '-----BEGIN' line")
    return content


def describe_exposure(host: str, address: str, credentials: Credentials) -> str:
    """Return what others on the network can read of a job, for people; empty: nothing leaves this machine in the clear.

    >>> describe_exposure("a", "127.0.0.2", Credentials("secret"))
    ''
    """
    with contextlib.suppress(ValueError):  # a name: of a machine in a network
        if ipaddress.ip_address(address.strip("[]")).is_loopback:
            return ""
    if credentials.tls is not None:
        return ""
    return (
        f"{host}: the job's states and programs cross the network in the clear; --tls encrypts them "
        "(docs/operations.md, Security)"
    )
