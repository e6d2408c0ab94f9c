"""The port of a process for its peers: one listener, one handshake, and the services behind it."""

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from resilient_jax.transport.authentication import Authenticator, OnEvent
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.incoming_connections import IncomingConnections, Visit
from resilient_jax.transport.peer_handshake import PeerHello, admit
from resilient_jax.transport.server_address import explain_bind_failure

ADMISSION_TIMEOUT_S: Final = 10.0
"""The limit for a caller to prove itself."""


class PeerService(Protocol):
    """What a process does for callers that have proved that they are of its job."""

    def serve(self, visit: Visit, hello: PeerHello, welcome: Callable[[], None]) -> None:
        """Serve a connection, until either side ends it.

        Args:
            welcome: to be called first, once the service is ready for what the caller sends.
        """
        ...


class PeerServer:
    """Serves each connection on a thread of its own.

    Attributes:
        port: port that the server listens on.
        address: where callers reach the server, "host:port".
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        services: Mapping[str, PeerService],
        *,
        name: str,
        on_event: OnEvent | None = None,
    ) -> None:
        """Bind a free port and serve.

        Args:
            host: address of this machine that peers reach.
            services: by name.
            name: name of the threads, also in messages.
            on_event: called with connections that are refused for their token.

        Raises:
            ConfigError: a TLS file cannot be read or is damaged.
            OutOfResources: this process, or the machine, has no descriptor or memory left.
            OperatorError: the address cannot be bound, for another reason that the message names.
        """
        self._services = services
        self._gate = Authenticator(credentials.token, on_event)
        self._is_secured = credentials.tls is not None
        self._host = host
        try:
            self._incoming = IncomingConnections(host, credentials, self._serve, name)
        except OSError as error:
            raise explain_bind_failure(host.strip("[]"), 0, host, credentials.tls) from error
        self.port = self._incoming.port
        self.address = f"{host}:{self.port}"

    def __len__(self) -> int:
        """Return how many connections there are, of peers and of strangers."""
        return len(self._incoming)

    def shut_down(self) -> None:
        """Close the port, and have every connection closed by its thread."""
        self._incoming.shut_down()

    def close(self) -> None:
        """Shut down, and wait until all threads have ended; not to be called by a service."""
        self._incoming.close()

    def _serve(self, visit: Visit) -> None:
        deadline_s = time.monotonic() + ADMISSION_TIMEOUT_S
        # Not `self.address`: a caller may come while this object is made.
        own_address = None if self._is_secured else f"{self._host}:{visit.connection.getsockname()[1]}"
        hello, send_welcome = admit(
            visit.connection, self._gate, self._services.keys(), own_address, visit.peer, deadline_s
        )

        def welcome() -> None:
            send_welcome()
            visit.let_in()

        self._services[hello.service].serve(visit, hello, welcome)
