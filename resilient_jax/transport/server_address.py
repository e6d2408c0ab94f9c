"""The address of a server: parsing and binding, with the reason why it cannot be bound."""

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import grpc

from resilient_jax.errors import (
    EXHAUSTION_ERRNOS,
    AddressInUse,
    ConfigError,
    OperatorError,
    OutOfResources,
    PeerUnreachable,
    ResilientJaxError,
)
from resilient_jax.transport.credentials import (
    Credentials,
    TlsFiles,
    certificate_configuration,
    find_damaged_file,
)
from resilient_jax.transport.renewed_files import RenewedFiles


def bind_server(
    address: str,
    credentials: Credentials,
    add_insecure_port: Callable[[str], int],
    add_secure_port: Callable[[str, grpc.ServerCredentials], int],
) -> str:
    """Bind a gRPC server to `address` ("host:port", port 0 for any).

    Returns:
        The address with the actual port.

    Raises:
        AddressInUse: another process listens there.
        ConfigError: the address is not of the form host:port, or a TLS file cannot be read or is damaged.
        OutOfResources: this process, or the machine, has no descriptor or memory left.
        OperatorError: the address cannot be bound, for another reason that the message names.
    """
    host, port = parse_address(address)
    tls = _make_server_credentials(credentials.tls) if credentials.tls is not None else None
    try:
        got = add_insecure_port(address) if tls is None else add_secure_port(address, tls)
    except RuntimeError as error:
        raise explain_bind_failure(host, port, address, credentials.tls) from error
    if got == 0:
        raise explain_bind_failure(host, port, address, credentials.tls)
    return f"{address.rpartition(':')[0]}:{got}"


def _make_server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return gRPC's credentials for a server that refuses clients without a certificate, and notices new files."""
    files = RenewedFiles(tls, certificate_configuration)
    return grpc.dynamic_ssl_server_credentials(files.get(), files.get, require_client_authentication=True)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[ipv6]:port".

    Raises:
        ConfigError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"expected an address like 127.0.0.1:7000, found {address!r}")
    return host.strip("[]"), int(port)


def check_own_address(called: str, own: str) -> None:
    """Check that a client that has called an address has reached this server, and nobody between them.

    That is so at an address of this machine with the server's port. On loopback any port will do: who forwards from
    there is on the client's own machine (`ssh -L`, `kubectl port-forward`). This may wait for a name server.

    Args:
        called: "host:port", as the client has called.
        own: address where this server listens, "host:port".

    Raises:
        PeerUnreachable: there may be somebody.
    """
    if not _is_own_address(called, own):
        raise PeerUnreachable(
            f"the server at {own} was called as {called}, which is no address of its machine and this port. Call it by "
            "one, or encrypt with --tls: then the name of its certificate counts"
        )


def _is_own_address(called: str, own: str) -> bool:
    if called == own:
        return True
    try:
        (host, port), (_, own_port) = parse_address(called), parse_address(own)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (ConfigError, OSError, UnicodeError):
        return False
    return all(
        ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback
        or (port == own_port and _is_of_this_machine(family, where))
        for family, _, _, _, where in found
    )


def _is_of_this_machine(family: int, where: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((where[0], 0, *where[2:]))
        except OSError:
            return False
    return True


def check_bindable(host: str, port: int) -> None:
    """Bind a plain socket, because gRPC hides the error of a failed bind, and close it.

    Raises:
        OSError: the address cannot be bound.
        UnicodeError: the host is no valid DNS name.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen()


def explain_bind_failure(host: str, port: int, address: str, tls: TlsFiles | None) -> ResilientJaxError:
    """Return the error of a server that could not listen on an address, found by trying once more."""
    try:
        check_bindable(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return AddressInUse(
                f"cannot listen on {address}: another process does. Choose another port, "
                f"or end that process (`ss -ltnp 'sport = :{port}'` names it)"
            )
        if error.errno in EXHAUSTION_ERRNOS:
            return OutOfResources(
                f"cannot listen on {address}: {error.strerror}; expected free descriptors (ulimit -n) and memory. "
                "Raise the limit, and start again"
            )
        return OperatorError(f"cannot listen on {address}: {error.strerror or error}")
    except UnicodeError as error:
        return OperatorError(f"cannot listen on {address}: {error}")
    if tls is not None and (damage := find_damaged_file(tls)) is not None:
        return ConfigError(f"cannot listen on {address}: {damage}")
    return OperatorError(
        f"cannot listen on {address}: a server could not bind it, a plain socket can; try again"
    )
