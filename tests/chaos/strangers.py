"""Strangers at the ports of a job: connections that say nothing, and others that send what nobody understands."""

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
GARBAGE_BYTES = 4096
CONNECT_TIMEOUT_S = 1.0


def flood_ports(pids: Sequence[int], connections: int, rng: random.Random) -> Callable[[], None]:
    """Have strangers at all ports that these processes listen on, and return the function that ends it.

    Args:
        pids: processes in this process's network namespace.
        connections: how many of the strangers stay and say nothing; one more comes and goes, and sends `rng`'s bytes.

    Raises:
        OSError: a process is in another network namespace, or none listens.
    """
    ports = sorted({port for pid in pids for port in find_listening_ports(pid)})
    if not ports:
        raise OSError(f"none of the processes {list(pids)} listens on a port")
    is_over = threading.Event()
    visitor = threading.Thread(
        target=_visit, args=(ports, connections, rng.randbytes(GARBAGE_BYTES), is_over), daemon=True
    )
    visitor.start()

    def end() -> None:
        is_over.set()
        visitor.join()

    return end


def find_listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on.

    Raises:
        OSError: the process is in another network namespace than this one, or has ended.
    """
    if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        raise OSError(f"process {pid} is in another network namespace")
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        int(words[1].rpartition(":")[2], 16)
        for words in lines
        if words[3] == LISTENS and f"socket:[{words[9]}]" in sockets
    ]


def _visit(ports: Sequence[int], connections: int, garbage: bytes, is_over: threading.Event) -> None:
    with contextlib.ExitStack() as idle:
        for number in range(connections):
            if is_over.is_set():
                return
            # Refused where the job turns strangers away: that it goes on is what is tested.
            with contextlib.suppress(OSError):
                idle.enter_context(_connect(ports[number % len(ports)]))
        while not is_over.is_set():
            _send_garbage(ports, garbage, is_over)


def _send_garbage(ports: Iterable[int], garbage: bytes, is_over: threading.Event) -> None:
    for port in ports:
        if is_over.is_set():
            return
        with contextlib.suppress(OSError), _connect(port) as stranger:
            stranger.sendall(garbage)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), CONNECT_TIMEOUT_S)
