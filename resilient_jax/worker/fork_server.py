"""The process that workers of this machine are forked from: `python -m resilient_jax.worker.fork_server`.

1. It imports what the script imports of JAX, Flax, Optax, Orbax and NumPy, once; it makes no JAX backend, and has no
   thread but those of OpenBLAS, which ends its own at a fork.
2. `launch` gives it a connection for each agent. At an agent's order it forks a worker, which gets the agent's
   descriptors and environment, and runs the script as `python SCRIPT` would. That takes milliseconds, where each worker
   would import for a second or more of processor time.
3. It refuses an order that it cannot carry out faithfully: another environment than its own, libraries that were
   changed on disk, or are not installed but the user's own, a module beside the script with the name of one that is
   imported, a script that sets environment variables. Then the agent starts a process as on any machine.

It reports how its workers end, kills those whose agent is gone, and ends with the launcher; workers end with it.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from typing import Final

import numpy as np

from resilient_jax.errors import MessageError
from resilient_jax.protocol.connection import Connection, Received
from resilient_jax.protocol.fork_messages import (
    FORK_ORDER_DECODER,
    ForkMessage,
    ForkOrder,
    ForkRefused,
    ForkWorker,
    ReapWorker,
    WorkerEnded,
    WorkerForked,
)
from resilient_jax.protocol.framing import FrameError
from resilient_jax.worker.imported_modules import (
    find_changed_module,
    find_file,
    find_script_folder,
    is_below,
    list_installed_folders,
)
from resilient_jax.worker.kept_imports import begin_kept_imports
from resilient_jax.worker.promotion import set_worker_variables
from resilient_jax.worker.script_imports import find_script_imports
from resilient_jax.worker.script_process import run_script

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
NUM_DESCRIPTORS: Final = 5
"""Of an order: standard output and error, and what connects a worker."""
MAX_NAMED_VARIABLES: Final = 5
"""Of those that differ, in a refusal."""

AgentConnection = Connection[ForkMessage, ForkOrder]

_libc = ctypes.CDLL(None, use_errno=True)
_started_ns = time.time_ns()
"""About when this process began to import; what is written later is not what it has imported."""


def main() -> None:
    """Import, then fork a worker for each order; return in a worker only, at the end of its script."""
    launcher, script = AgentConnection(int(sys.argv[1]), FORK_ORDER_DECODER), sys.argv[2]
    server = ForkServer(launcher, dict(os.environb))
    server.prepare(script)
    order = server.serve()
    del server, launcher
    begin_kept_imports(order.settings.program)
    run_script(order.command)


class ForkServer:
    """The connections of the launcher and of agents, and the workers that have not been reaped."""

    def __init__(self, launcher: AgentConnection, environment: dict[bytes, bytes]) -> None:
        """Serve the agents that the launcher names; workers must be asked for with this environment."""
        self._launcher = launcher
        self._environment = environment
        self._changes: dict[bytes, bytes] = {}
        """Environment variables that the imported libraries have set."""
        self._obstacle = ""
        self._agents: dict[int, AgentConnection] = {}
        """Connections to agents by their descriptors."""
        self._num_modules = 0
        """How many modules have been imported from files."""
        self._workers: dict[int, tuple[int, AgentConnection | None]] = {}
        """Process id and agent (None: it is gone), by the descriptor of the process."""
        self._unreaped: dict[int, AgentConnection | None] = {}
        """The agent, by the id of a worker that has ended."""
        self._poll = select.poll()
        self._poll.register(launcher.fileno(), select.POLLIN)

    def prepare(self, script: str) -> None:
        """Import what the script imports, unless there is an obstacle."""
        folder = find_script_folder(script)
        if not sys.flags.safe_path:
            sys.path[0] = folder  # in the place of the current folder, which `-m` puts there
        modules, self._obstacle = find_script_imports(script)
        before = set(sys.modules)
        for name in modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:  # the name of no module, but of something in one
                continue
            except Exception as error:  # it is imported in part: the script would meet another error
                self._obstacle = f"import {name}: {type(error).__name__}: {error}"
        self._changes = {k: v for k, v in os.environb.items() if self._environment.get(k) != v}
        self._num_modules = sum(find_file(name, module) is not None for name, module in sys.modules.items())
        self._obstacle = (
            self._obstacle or _find_module_beside(folder) or _find_own_module(before) or _find_thread()
        )
        gc.collect()
        gc.freeze()  # workers share the memory of what is never collected

    def serve(self) -> ForkWorker:
        """Carry out orders until the launcher is gone; return in each worker, with its order."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._workers:
                    self._report_end(descriptor)
                elif descriptor in self._agents:
                    if (order := self._handle_orders(descriptor)) is not None:
                        return order
                elif descriptor == self._launcher.fileno():
                    self._add_agents()

    def _add_agents(self) -> None:
        try:
            received = self._launcher.receive(0.0)
        except (EOFError, FrameError, MessageError):
            sys.exit(0)  # the launcher is gone; the kernel ends the workers with this process
        for descriptor in (descriptor for item in received for descriptor in item.descriptors):
            self._agents[descriptor] = AgentConnection(descriptor, FORK_ORDER_DECODER)
            self._poll.register(descriptor, select.POLLIN)

    def _handle_orders(self, descriptor: int) -> ForkWorker | None:
        """Carry out what an agent has ordered; return a worker's order in this worker, else None."""
        agent = self._agents[descriptor]
        try:
            for received in agent.receive(0.0):
                order = received.message
                if isinstance(order, ReapWorker):
                    self._reap(order.pid, agent)
                elif isinstance(order, ForkWorker) and self._fork(agent, order, received):
                    return order
        except (EOFError, OSError, FrameError, MessageError):
            self._drop_agent(descriptor)
        return None

    def _fork(self, agent: AgentConnection, order: ForkWorker, received: Received[ForkOrder]) -> bool:
        """Fork a worker and answer the agent; return whether this process is the worker."""
        try:
            descriptors = received.take_descriptors(NUM_DESCRIPTORS)
        except MessageError as error:
            agent.send(ForkRefused(reason=str(error)))
            return False
        reason, server, pid = self._find_obstacle(order), os.getpid(), -1
        try:
            pid = os.fork() if not reason else -1
            if pid == 0:
                self._leave(order, descriptors, server)
                return True
            if pid > 0:
                self._watch(pid, agent)
        except OSError as error:
            reason = f"fork: {error}"
        for descriptor in descriptors:
            os.close(descriptor)
        found = ForkRefused(reason=reason) if reason else WorkerForked(pid=pid, num_modules=self._num_modules)
        agent.send(found)
        return False

    def _leave(self, order: ForkWorker, descriptors: tuple[int, ...], server: int) -> None:
        """Be a worker from now on, in the process that has just been forked, and no server; end it if that fails."""
        try:
            for connection in (self._launcher, *self._agents.values()):
                connection.abandon()  # the descriptors are closed with all others
            _become_worker(order, order.environment | self._changes, descriptors, server)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _watch(self, pid: int, agent: AgentConnection) -> None:
        """Wait for the end of a new worker, or end it.

        Raises:
            OSError: no descriptor is left to watch the worker.
        """
        try:
            process = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._workers[process] = (pid, agent)
        self._poll.register(process, select.POLLIN)

    def _find_obstacle(self, order: ForkWorker) -> str:
        """Return why a fork of this process would not be what the agent asks for; empty: it would."""
        if self._obstacle:
            return self._obstacle
        theirs, ours = order.environment, self._environment
        differing = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        if differing:
            shown = ", ".join(os.fsdecode(name) for name in differing[:MAX_NAMED_VARIABLES])
            return f"found other environment variables than this process was started with: {shown}"
        if changed := find_changed_module(_started_ns):
            return f"{changed} was changed after it had been imported"
        return ""

    def _report_end(self, process: int) -> None:
        """Tell its agent that a worker has ended; its id stays taken until the agent confirms, if there is one."""
        ended = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return  # another process has the descriptor since
        pid, agent = self._workers.pop(process)
        self._poll.unregister(process)
        os.close(process)
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._unreaped[pid] = agent
        try:
            if agent is not None:
                agent.send(WorkerEnded(pid=pid, exit_code=code))
        except OSError:
            agent = None
        if agent is None:
            _kill(pid)  # what is left of its process group
            del self._unreaped[pid]
            os.waitpid(pid, 0)

    def _reap(self, pid: int, agent: AgentConnection) -> None:
        if self._unreaped.get(pid) is agent:
            del self._unreaped[pid]
            os.waitpid(pid, 0)

    def _drop_agent(self, descriptor: int) -> None:
        """End the workers of an agent that is gone; each is reaped when it has ended, which may take a while."""
        agent = self._agents.pop(descriptor)
        self._poll.unregister(descriptor)
        agent.close()
        for process, (pid, owner) in self._workers.items():
            if owner is agent:
                self._workers[process] = (pid, None)
                _kill(pid)
        for pid in [pid for pid, owner in self._unreaped.items() if owner is agent]:
            _kill(pid)
            self._reap(pid, agent)


def _kill(pid: int) -> None:
    """Send SIGKILL to a child and to its process group, which it may not lead yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _find_module_beside(folder: str) -> str:
    """Return why a script in this folder would import others than this process has; empty: it would not."""
    names = {name for name in sys.modules if "." not in name and name != "__main__"}
    for entry in sorted(os.listdir(folder)):
        name = entry.removesuffix(".py")
        file = find_file(name, sys.modules.get(name))
        if name in names and file is not None and not is_below(file, folder):
            return f"{os.path.join(folder, entry)} has the name of a module that is imported from {file}"
    return ""


def _find_own_module(before: set[str]) -> str:
    """Return which imported module is the user's: a worker imports that from the copy that its job has kept."""
    installed = tuple(f"{path}{os.sep}" for path in list_installed_folders())
    for name in sys.modules.keys() - before:
        file = find_file(name, sys.modules[name])
        if file is not None and not os.path.realpath(file).startswith(installed):
            return f"the libraries import {file}, which is not installed, but a part of the job's program"
    return ""


def _find_thread() -> str:
    """Return which thread forbids a fork: a lock that another one holds then is held for ever. Empty: none does."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        return f"the imports have started threads: {', '.join(sorted(others))}"
    # OpenBLAS ends its threads at a fork, and starts them again when they are needed; nothing else does.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    left = [name for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    return f"the imports have started {len(left)} threads outside of Python" if left else ""


def _become_worker(
    order: ForkWorker, environment: dict[bytes, bytes], descriptors: tuple[int, ...], server: int
) -> None:
    """Make this process, which has just been forked, what a process is that an agent starts as a worker."""
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)  # the server died before prctl
    # For `ps` and `top`; the command line stays that of the server.
    _libc.prctl(PR_SET_NAME, os.fsencode(os.path.basename(order.command[0])))
    output, error, *others = descriptors
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(error, 2)
    for name in os.listdir("/proc/self/fd"):
        if (descriptor := int(name)) not in {0, 1, 2, *others}:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)
    os.environb.clear()
    os.environb.update(environment)
    set_worker_variables(others, order.settings)
    np.random.seed()  # else all workers would draw the same numbers; `random` takes care of itself


if __name__ == "__main__":
    main()
