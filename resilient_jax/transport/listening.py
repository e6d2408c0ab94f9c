"""Opening a server's port, and saying why it could not be opened."""

import errno
import socket
from collections.abc import Callable

import grpc

from resilient_jax.errors import AddressInUse, ConfigError, OperatorError
from resilient_jax.transport.credentials import Credentials, server_credentials


def bind(
    address: str,
    credentials: Credentials,
    add_insecure_port: Callable[[str], int],
    add_secure_port: Callable[[str, grpc.ServerCredentials], int],
) -> str:
    """Binds a gRPC server to `address` ("host:port", port 0 for any).

    Returns:
        The address with the port it got.

    Raises:
        AddressInUse: another process listens there.
        ConfigError: the address is not of the form host:port, or a TLS file cannot be read.
        OperatorError: the address cannot be bound for another reason, which the message names.
    """
    host, port = split_address(address)
    tls = server_credentials(credentials.tls) if credentials.tls is not None else None
    try:
        got = add_insecure_port(address) if tls is None else add_secure_port(address, tls)
    except RuntimeError as error:
        raise _why_not(host, port, address) from error
    if got == 0:
        raise _why_not(host, port, address)
    return f"{address.rpartition(':')[0]}:{got}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port".

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"expected an address like 127.0.0.1:7000, found {address!r}")
    return host.strip("[]"), int(port)


def _why_not(host: str, port: int, address: str) -> OperatorError:
    """Binds once more with a plain socket, whose error gRPC keeps to itself."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return AddressInUse(
                f"cannot listen on {address}: another process does. Choose another port, "
                f"or end that process (`ss -ltnp 'sport = :{port}'` names it)"
            )
        return OperatorError(f"cannot listen on {address}: {error.strerror or error}")
    return OperatorError(f"cannot listen on {address}: gRPC could not bind it, a plain socket can; try again")
