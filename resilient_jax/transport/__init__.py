"""Transport of typed messages between processes: msgspec structs over gRPC, with a job token and a deadline.

See README.md in this folder.
"""

from resilient_jax.transport import _grpc_environment as _grpc_environment
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials, TlsFiles
from resilient_jax.transport.method import Method
from resilient_jax.transport.peer_channel import PeerChannel
from resilient_jax.transport.peer_server import PeerServer
from resilient_jax.transport.server import Server

__all__ = [
    "Channel",
    "Credentials",
    "Method",
    "PeerChannel",
    "PeerServer",
    "Server",
    "TlsFiles",
]
