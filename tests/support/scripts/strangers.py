"""Strangers at the gRPC port argv[1] and the ports argv[2:], until they are killed.

One thread connects again and again and sends what nobody understands; the main one makes calls without a proof, many at
a time. A line is printed for each hundred calls that were refused.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import threading

import grpc
import grpc.aio

from resilient_jax.store.messages import KEEP_ALIVE, SERVICE
from resilient_jax.transport.method import format_method_path

GARBAGE = os.urandom(4096)
NUM_CHANNELS = 10
NUM_CALLS = 100
"""At a time on each channel, as many as a server lets a client make."""


def connect_again(ports: list[int]) -> None:
    """Send garbage to the ports in turn."""
    for port in itertools.cycle(ports):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(GARBAGE)


async def call_again(port: int) -> None:
    """Call the store without a proof."""
    path = format_method_path(SERVICE, KEEP_ALIVE)
    numbers = itertools.count(1)

    async def call(channel: grpc.aio.Channel) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary(path)(GARBAGE)
            if next(numbers) % 100 == 0:
                print("refused", flush=True)

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(NUM_CHANNELS)]
    await asyncio.gather(*[call(channel) for channel in channels for _ in range(NUM_CALLS)])


if __name__ == "__main__":
    all_ports = [int(port) for port in sys.argv[1:]]
    threading.Thread(target=connect_again, args=(all_ports,), daemon=True).start()
    asyncio.run(call_again(all_ports[0]))
