"""Connections between agents, shared by the agents of a process, which stand for as many machines with one each."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from resilient_jax.cluster import progress_relay, status_combiner
from resilient_jax.transport import grpc_options
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.method import MAX_MESSAGE_BYTES

WITHOUT_PINGS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
"""A process that stands for thousands of agents answers no ping within 2 s."""


class _SharedChannel(Channel):
    """A channel that lasts as long as the process."""

    async def close(self) -> None:
        """Leave the connection to the others."""


@contextlib.contextmanager
def share_connections(answer_timeout_s: float) -> Iterator[None]:
    """Have all agents of this process share one connection to each other agent, and wait so long for its answers."""

    @functools.cache
    def open_channel(address: str, credentials: Credentials) -> Channel:
        return _SharedChannel(address, credentials)

    with (
        mock.patch.object(grpc_options, "_both_sides", return_value=WITHOUT_PINGS),
        mock.patch.object(progress_relay, "Channel", open_channel),
        mock.patch.object(progress_relay, "REPORT_TIMEOUT_S", answer_timeout_s),
        mock.patch.object(status_combiner, "Channel", open_channel),
        mock.patch.object(status_combiner, "ANSWER_TIMEOUT_S", answer_timeout_s),
    ):
        yield
