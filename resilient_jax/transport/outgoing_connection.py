"""Connecting to a peer's socket, with TLS where it is configured, in a way that another thread can end."""

import socket
import ssl
import time
from typing import Any, Final

from resilient_jax.errors import PeerUnreachable
from resilient_jax.transport.bulk_protocol import configure_socket, make_client_context
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.open_sockets import OpenSockets
from resilient_jax.transport.renewed_files import RenewedFiles
from resilient_jax.transport.server_address import parse_address

CONNECT_TIMEOUT_S: Final = 10.0


class Connector:
    """Connects to one address; safe to share between threads."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Read the TLS files.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self._tls: RenewedFiles[ssl.SSLContext] | None = None
        self._server_name: str | None = None
        if credentials.tls is not None:
            self._tls = RenewedFiles(credentials.tls, make_client_context)
            self._server_name = credentials.tls.server_name

    def connect(self, deadline_s: float, sockets: OpenSockets) -> socket.socket:
        """Return a new connection, to the first address of the host that accepts it; it is in `sockets`.

        Raises:
            PeerUnreachable: no connection can be made; `is_refused` is set where no process listens.
        """
        host, port = parse_address(self.address)
        failure: OSError | None = None
        try:
            for family, kind, protocol, _, socket_address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                try:
                    return self._connect_to(
                        socket.socket(family, kind, protocol), socket_address, host, deadline_s, sockets
                    )
                except OSError as error:
                    failure = error
        except OSError as error:  # no such name
            failure = error
        refused = isinstance(failure, ConnectionRefusedError)
        raise PeerUnreachable(f"{self.address} cannot be reached: {failure}", is_refused=refused) from failure

    def _connect_to(
        self,
        connection: socket.socket,
        socket_address: Any,  # noqa: ANN401 - its type depends on the address family
        host: str,
        deadline_s: float,
        sockets: OpenSockets,
    ) -> socket.socket:
        try:
            sockets.add(connection)
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.connect(socket_address)
            if self._tls is not None:
                plain = connection
                connection = self._tls.get().wrap_socket(plain, server_hostname=self._server_name or host)
                sockets.add(connection, replacing=plain)
            configure_socket(connection)
            return connection
        except BaseException:
            sockets.close(connection)
            raise
