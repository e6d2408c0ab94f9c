"""Options of our gRPC connections: keepalive, reconnection, limits of messages.

A process that dies on a running machine is detected at once (its kernel closes the connection). Keepalive pings detect
a machine that vanishes and a process that is stopped: a client does so after at most 4 s, as somebody waits for the
answer. A server is patient: a client that is gone costs it the memory of its streams, and one that was only stopped, or
cut off for some seconds, goes on.
"""

import dataclasses
from typing import Final

from resilient_jax.transport.method import MAX_MESSAGE_BYTES

GrpcOptions = list[tuple[str, int | str]]

INITIAL_BACKOFF_MS = 50
MAX_BACKOFF_MS = 500
CONNECT_TIMEOUT_MS = 5000
"""The limit of one attempt to connect; the default of 20 s would outlast most of our deadlines."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keepalive:
    """When a silent peer counts as gone.

    Attributes:
        interval_ms: time after a ping, or the last byte, until the next ping.
        timeout_ms: limit for the answer to a ping.
    """

    interval_ms: int
    timeout_ms: int


IMPATIENT: Final = Keepalive(2000, 2000)
"""Of a client that waits for answers."""
PATIENT: Final = Keepalive(5000, 20_000)
"""Of a server, and of a client whose connection cannot be replaced. Hosts that are silent for so long have lost their
leases, unless those are longer than usual."""


def server_options() -> GrpcOptions:
    """Return the options of a server that permits its clients' pings and shares its port with no other process."""
    return [
        *_both_sides(PATIENT),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", IMPATIENT.interval_ms // 4),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(server_name: str | None, keepalive: Keepalive) -> GrpcOptions:
    """Return the options of a client that reconnects quickly and uses no proxy.

    Args:
        server_name: the name to expect in the server's certificate; None for the host of the address.
        keepalive: when the server counts as gone.
    """
    options: GrpcOptions = [
        *_both_sides(keepalive),
        ("grpc.initial_reconnect_backoff_ms", INITIAL_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel inherits no backoff of an old one
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # callers know which calls may be repeated, gRPC does not
    ]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def _both_sides(keepalive: Keepalive) -> GrpcOptions:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive.interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
        # keepalive_timeout_ms alone does not end the connection: gRPC 1.85 then waits for this timeout, by default 60 s
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # 0 is "no limit"
    ]
