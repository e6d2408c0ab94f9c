"""A snapshot server that waits for a connection to another only so long: argv[1], in seconds."""

import sys

from resilient_jax.snapshot import server
from resilient_jax.transport import peer_channel


def main() -> None:
    setattr(peer_channel, "CONNECT_TIMEOUT_S", float(sys.argv[1]))  # noqa: B010 - no assignment to a Final name
    server.main()
