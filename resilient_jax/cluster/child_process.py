"""Child processes that never outlive their parent: started, watched and ended in one way.

Rules: a child gets SIGKILL from the kernel when the thread that started it ends (so: start children from the main
thread); it leads a process group of its own, so that ending the group ends its children; its exit is noticed through
a pidfd, in milliseconds and without a thread. Linux only, like the rest of the agent.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STOPPED_POLL_INTERVAL_S = 0.1
"""How often a stop is looked for: the kernel reports one only to the parent's waitpid."""

_SHIM = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the parent died before prctl
os.execvp(sys.argv[2], sys.argv[2:])
"""


def get_signal_name(number: int) -> str:
    """Return a signal's name, such as "SIGKILL"; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def bind_to_this_process(command: Sequence[str]) -> list[str]:
    """Return the command, wrapped so that the kernel kills the process when this one dies.

    A wrapper and not `preexec_fn`: that forks this process with its gRPC threads, which may deadlock.
    """
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]


class ChildProcess:
    """A running child process.

    Attributes:
        process: the handle; its pipes are the caller's to read.
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
    ) -> None:
        self.process = subprocess.Popen(
            bind_to_this_process(command),
            env=dict(env) if env is not None else None,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        try:
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError:  # out of descriptors: a child that cannot be watched must not run
            with self.process:
                self.kill()
            raise
        self._exited: asyncio.Event = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The id of the command's process, which the wrapper turns into; another process may have it after the end."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while the process runs."""
        return self.process.returncode

    async def wait_exited(self) -> int:
        """Wait for the process's end; return the exit code."""
        await self._exited.wait()
        code = self.process.returncode
        assert code is not None, "reaped"
        return code

    def lower_priority(self) -> None:
        """Give the process only processor time that no other process wants, until it asks for more itself.

        A worker's start-up (imports, compilation) on a machine that trains meanwhile must not slow training down.
        SCHED_IDLE and not a nice value: any user may leave it again.
        """
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then start-up competes
            os.sched_setscheduler(self.process.pid, os.SCHED_IDLE, os.sched_param(0))

    def restore_priority(self) -> None:
        """Give the process normal priority again."""
        restore_normal_priority(self.process.pid)

    def kill(self) -> None:
        """Send SIGKILL to the process and to what is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def kill_and_wait(self) -> int:
        """Kill the process if it still runs; return the exit code."""
        self.kill()
        return await self.wait_exited()

    async def wait_exited_or_stopped(self) -> int:
        """Wait for the process's end, and end it if it is stopped, for then it serves no other process.

        Returns:
            The exit code.
        """
        exited = asyncio.create_task(self.wait_exited())
        try:
            while not (await asyncio.wait((exited,), timeout=STOPPED_POLL_INTERVAL_S))[0]:
                if self.is_stopped():
                    self.kill()
            return exited.result()
        finally:
            exited.cancel()

    def is_stopped(self) -> bool:
        """Return whether the process got SIGSTOP (a debugger's stop is another state and does not count)."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        # The last parenthesis: the process's name, which stands in parentheses, may contain some itself.
        return stat.rpartition(")")[2].split()[0] == "T"

    def _reap(self) -> None:
        if self.process.poll() is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not written yet has no reader
                self.process.stdin.close()
        # What the process started must not stay: the group outlives its leader.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._exited.set()


def restore_normal_priority(pid: int) -> None:
    """Give all threads of a process normal priority: its agent may have started it with the lowest."""
    for _ in range(2):  # a thread that starts during the first pass is found by the second
        with contextlib.suppress(OSError):  # the process is gone
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


async def open_line_reader(pipe: int) -> "tuple[asyncio.StreamReader, asyncio.ReadTransport]":
    """Return a stream over the read end of a pipe, for `async for line in ...`, and what closes it before its end."""
    reader = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    # A duplicate, because the transport closes its descriptor, and the caller closes that of the pipe.
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(pipe), "rb", buffering=0)
    )
    return reader, transport
