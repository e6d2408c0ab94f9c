"""Child processes that never outlive their parent: started, watched and ended in one way.

Rules: a child gets SIGKILL from the kernel when the thread that started it ends (so: start children from the main
thread); it leads a process group of its own, so that ending the group ends its children; its exit is noticed through
a pidfd, in milliseconds and without a thread. Linux only, like the rest of the agent.
"""

import abc
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from resilient_jax.notices import NOTICE_SIGNALS, blocked_notices

MAX_LINE_BYTES = 2**20
"""Of a process's output; a longer line is cut into parts."""
KILLING_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
"""By which the kernel, or a person, ends a process that has done nothing wrong."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOPPED_POLL_INTERVAL_S = 0.1
"""How often a stop is looked for: the kernel reports one only to the parent's waitpid."""

_SHIM = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the parent died before prctl
ignored = [int(number) for number in sys.argv[2].split()]
for number in ignored:
    signal.signal(number, signal.SIG_IGN)  # stays so in the command
signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def get_signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL"; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def bind_to_this_process(command: Sequence[str], ignored: Sequence[signal.Signals] = ()) -> list[str]:
    """Return the command, wrapped so that the kernel kills the process when this one dies.

    A wrapper and not `preexec_fn`: that forks this process with its gRPC threads, which may deadlock.

    Args:
        ignored: signals that the process ignores from the start; blocked until then, if the caller has blocked them.
    """
    numbers = " ".join(str(int(number)) for number in ignored)
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), numbers, *command]


STOPPED: Final = "T"
"""The state of a process that got SIGSTOP; one that a debugger has stopped has another."""
ENDED: Final = "Z"
"""The state of a process whose end its parent has not noted."""


def read_process_state(pid: int) -> str:
    """Return the letter that the kernel has for the state of a process, as `ps` shows it; empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The last parenthesis: the process's name, which stands in parentheses, may contain some itself.
    return stat.rpartition(")")[2].split()[0]


class ChildProcess(abc.ABC):
    """A running process of this one's: started by it, or forked for it by another.

    Attributes:
        stdout: read end of the process's standard output, which is the caller's to read and close; None: no pipe.
        stderr: read end of the process's standard error, likewise.
    """

    def __init__(self, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self._exited: asyncio.Event = asyncio.Event()

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """The id of the process; another process may have it after the end."""

    @property
    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while the process runs."""

    async def wait_exited(self) -> int:
        """Wait for the process's end; return the exit code."""
        await self._exited.wait()
        code = self.exit_code
        assert code is not None, "reaped"
        return code

    def lower_priority(self) -> None:
        """Give the process only processor time that no other process wants, until it asks for more itself.

        A worker's start-up (imports, compilation) on a machine that trains meanwhile must not slow training down.
        SCHED_IDLE and not a nice value: any user may leave it again.
        """
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then start-up competes
            os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    def restore_priority(self) -> None:
        """Give the process normal priority again."""
        restore_normal_priority(self.pid)

    def kill(self) -> None:
        """Send SIGKILL to the process and to what is left of its process group."""
        self._kill_group()
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill_and_wait(self) -> int:
        """Kill the process if it still runs; return the exit code."""
        self.kill()
        return await self.wait_exited()

    async def wait_exited_or_stopped(self) -> int:
        """Wait for the end, and end a process that is stopped, for then it serves no other; return the exit code."""
        exited = asyncio.create_task(self.wait_exited())
        try:
            while not (await asyncio.wait((exited,), timeout=STOPPED_POLL_INTERVAL_S))[0]:
                if self.is_stopped():
                    self.kill()
            return exited.result()
        finally:
            exited.cancel()

    def is_stopped(self) -> bool:
        """Return whether the process got SIGSTOP."""
        return read_process_state(self.pid) == STOPPED

    def close_pipes(self) -> None:
        """Close what the caller has of the process's output, which it does not read to the end."""
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Note that the process has ended, and end what it started: the group outlives its leader."""
        self._kill_group()
        self._exited.set()


class SpawnedProcess(ChildProcess):
    """A child that runs a command.

    Attributes:
        stdin: write end of the process's standard input; None: no pipe.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
        answers_notices: bool = False,
    ) -> None:
        """Start the command, which ignores `NOTICE_SIGNALS`; an agent `answers_notices`, and does not.

        Raises:
            OSError: there is no descriptor, process or memory left for the process.
        """
        ignored = () if answers_notices else NOTICE_SIGNALS
        with contextlib.nullcontext() if answers_notices else blocked_notices():
            self._process = subprocess.Popen(
                bind_to_this_process(command, ignored),
                env=dict(env) if env is not None else None,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        super().__init__(self._process.stdout, self._process.stderr)
        self.stdin = self._process.stdin
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # out of descriptors: a child that cannot be watched must not run
            with self._process:
                self.kill()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The id of the command's process, which the wrapper turns into; another process may have it after the end."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while the process runs."""
        return self._process.returncode

    def _reap(self) -> None:
        if self._process.poll() is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not written yet has no reader
                self.stdin.close()
        self._end()


def read_resident_mib(pid: int) -> int:
    """Return the resident memory of a process in MiB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES // 2**20
    return 0


def restore_normal_priority(pid: int) -> None:
    """Give all threads of a process normal priority: its agent may have started it with the lowest."""
    for _ in range(2):  # a thread that starts during the first pass is found by the second
        with contextlib.suppress(OSError):  # the process is gone
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


class LineReader(asyncio.StreamReader):
    """A stream of lines of any length: one that is longer than the limit comes in parts, each as a line.

    The reader of a process's output must read on whatever that prints: else the process stops at a full pipe.
    """

    _is_cut = False
    """The last line was a part without the end of its line."""

    async def readline(self) -> bytes:
        """Return the next line with its end, or the next part of one; empty at the end of the stream."""
        was_cut, self._is_cut = self._is_cut, False
        try:
            line = await self.readuntil()
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError as error:
            self._is_cut = True
            return await self.readexactly(error.consumed)
        # The end of a line whose last part was returned without it.
        return await self.readline() if was_cut and line == b"\n" else line


async def open_line_reader(pipe: int) -> "tuple[LineReader, asyncio.ReadTransport]":
    """Return a stream over the read end of a pipe, for `async for line in ...`, and what closes it before its end."""
    reader = LineReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    # A duplicate, because the transport closes its descriptor, and the caller closes that of the pipe.
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(pipe), "rb", buffering=0)
    )
    return reader, transport
