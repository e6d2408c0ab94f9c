"""Processes that are forked from one that has imported what they need: imports are most of what a small process takes.

`python -m tests.support.forge DESCRIPTOR MODULE...` imports these modules, makes no thread and no backend of JAX, and
forks a process for each order that comes by the socket. A forked process has the order's arguments and descriptors, and
calls a function; its end comes by a pipe of its own, as the exit code.
"""

import atexit
import fcntl
import functools
import importlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import msgspec

from tests.support.paths import ROOT
from tests.support.patience import patience

WAIT_S: Final = patience(12)
MAX_ORDER_BYTES: Final = 2**17
MAX_DESCRIPTORS: Final = 16
FIRST_FREE: Final = 500
"""Descriptors of an order are moved there, so that none is in the way of another's number."""


class Order(msgspec.Struct):
    """What a forked process is to do.

    Attributes:
        call: the function, as "module:function".
        arguments: of its command line.
        environment: variables beside those of the forge.
        numbers: those that its descriptors are to have; the first descriptor, that for the exit code, has none.
    """

    call: str
    arguments: list[str]
    environment: dict[str, str]
    numbers: list[int]


class _PipeEnd(io.RawIOBase):
    """This process's end of a pipe, which is closed when it is collected.

    Of a file Python would warn then, in whichever test it happens to collect it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._descriptor, [buffer])

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


class ForgedProcess:
    """A process that was forked, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int, exit_pipe: int, pipes: Sequence[IO[bytes] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = pipes
        self._pidfd = pidfd
        self._exit_pipe = exit_pipe

    def poll(self) -> int | None:
        """Return the exit code; None: the process lives."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0.0)[0]:
            self._note_end()
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Return the exit code once the process has ended."""
        if self.returncode is None:
            assert select.select([self._pidfd], [], [], timeout_s)[0], f"process {self.pid} does not end"
            self._note_end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _note_end(self) -> None:
        said = os.read(self._exit_pipe, 64)
        assert said, "the forge has ended before a process of its own"
        self.returncode = int(said)
        os.close(self._exit_pipe)
        os.close(self._pidfd)


class Forge:
    """A process from which others are forked."""

    def __init__(self, *modules: str, environment: Mapping[str, str] = os.environ) -> None:
        """Start it.

        Args:
            modules: to be imported; forked processes call functions of them.
            environment: of this process and of all that are forked; libraries read it at their import.
        """
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", __name__]  # JAX warns of each fork
        with theirs:
            # It is no child of this process, whose children other tests list: see `main`.
            subprocess.run(
                [*command, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": str(ROOT)},
                check=True,
                timeout=WAIT_S,
            )

    def start(
        self,
        call: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        has_pipes: bool = True,
        is_silent: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> ForgedProcess:
        """Return a process that calls a function.

        Args:
            call: the function, as "module:function".
            arguments: of the command line that the function finds.
            environment: what it has beside the variables of the forge.
            has_pipes: whether standard input and output are pipes to this process, or nothing and this process's.
            is_silent: whether nothing is to be seen of standard error.
            pass_fds: descriptors that it has, too, with these numbers.
        """
        with open(os.devnull, "r+b", buffering=0) as nothing:
            exit_pipe, theirs = os.pipe()
            ours: list[int] = []
            closed = [theirs]
            if has_pipes:
                (stdin, to_it), (from_it, stdout) = os.pipe(), os.pipe()
                ours, closed = [to_it, from_it], [theirs, stdin, stdout]
            else:
                stdin, stdout = nothing.fileno(), 1
            stderr = nothing.fileno() if is_silent else 2
            order = Order(call, list(arguments), dict(environment or {}), [0, 1, 2, *pass_fds])
            descriptors = [theirs, stdin, stdout, stderr, *pass_fds]
            socket.send_fds(self._connection, [msgspec.json.encode(order)], descriptors)
            for descriptor in closed:
                os.close(descriptor)
        answer, (pidfd,), *_ = socket.recv_fds(self._connection, 64, 1)
        pipes = (None, None)
        if ours:
            pipes = (io.BufferedWriter(_PipeEnd(ours[0])), io.BufferedReader(_PipeEnd(ours[1])))
        return ForgedProcess(int(answer), pidfd, exit_pipe, pipes)

    def end(self) -> None:
        """End it; what was forked lives on, and nobody hears of its end."""
        self._connection.close()


@functools.cache
def share_forge(*modules: str) -> Forge:
    """Return a forge of these modules for all tests of this process."""
    forge = Forge(*modules)
    atexit.register(forge.end)
    return forge


def serve(connection: socket.socket) -> Order | None:
    """Fork a process for each order; return the order in each, and None here, when the test has ended."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    exit_pipes: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ends(exit_pipes)
        if connection in ready:
            said, descriptors, *_ = socket.recv_fds(connection, MAX_ORDER_BYTES, MAX_DESCRIPTORS)
            if not said:
                return None
            exit_pipe, *given = descriptors
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.detach()
                order = msgspec.json.decode(said, type=Order)
                take_descriptors(dict(zip(order.numbers, given, strict=True)))
                return order
            exit_pipes[pid] = exit_pipe
            pidfd = os.pidfd_open(pid)
            socket.send_fds(connection, [str(pid).encode()], [pidfd])
            for descriptor in (pidfd, *given):
                os.close(descriptor)


def report_ends(exit_pipes: dict[int, int]) -> None:
    """Tell the exit codes of the processes that have ended, by process id."""
    while exit_pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        exit_pipe = exit_pipes.pop(pid)
        os.write(exit_pipe, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(exit_pipe)


def take_descriptors(by_number: Mapping[int, int]) -> None:
    """Have descriptors with these numbers, and no others."""
    moved = {number: fcntl.fcntl(given, fcntl.F_DUPFD, FIRST_FREE) for number, given in by_number.items()}
    for number, given in moved.items():
        os.dup2(given, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in by_number:
            try:
                os.close(int(name))
            except OSError:
                continue  # that of the list itself


def main() -> None:
    """Import, and serve; in a forked process call what its order names."""
    if os.fork():
        os._exit(0)  # and so this is nobody's child
    for module in sys.argv[2:]:
        importlib.import_module(module)
    bridge = sys.modules.get("jax._src.xla_bridge")
    assert bridge is None or not bridge._backends, "a backend of JAX has threads, which no fork has"
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is None:
        return
    os.environ.update(order.environment)
    module, _, function = order.call.partition(":")
    sys.argv[:] = [module, *order.arguments]
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
