"""The process that workers are forked from: `python -m resilient_jax.worker.zygote`, started by a launcher or agent.

1. It imports once what the script imports: of a worker's report all libraries, else what is found in the script's text
   of JAX, Flax, Optax, Orbax and NumPy. It makes no JAX backend, imports no module of the user's, and has no thread but
   those of OpenBLAS, which ends its own at a fork.
2. Its owner gives it a connection for each agent. At an agent's order it forks a worker (see `forked_worker`), which
   gets the agent's descriptors and environment, and runs the script as `python SCRIPT` would. That takes milliseconds,
   where each worker would import for a second or more of processor time.
3. It refuses an order that it cannot carry out faithfully: another environment than that it was prepared for, libraries
   that were changed on disk, that start a thread, open a file, or are not installed but the user's own, a module beside
   the script with the name of one that is imported. Then the agent starts a process.

It ends with its owner; the workers that it has forked live on.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
from typing import Final

from resilient_jax.errors import MessageError
from resilient_jax.protocol.connection import Connection, Received
from resilient_jax.protocol.framing import FrameError
from resilient_jax.protocol.worker_messages import ImportsReported
from resilient_jax.protocol.zygote_messages import (
    ZYGOTE_ORDER_DECODER,
    ForkRefused,
    ForkWorker,
    PrepareZygote,
    ZygoteOrder,
    ZygoteReady,
)
from resilient_jax.worker.forked_worker import AnswerConnection, fork_worker
from resilient_jax.worker.imported_modules import (
    find_changed_module,
    find_file,
    find_foreign_module,
    find_script_folder,
    import_again,
    is_below,
    list_installed_folders,
)
from resilient_jax.worker.kept_imports import begin_kept_imports
from resilient_jax.worker.script_imports import find_script_imports
from resilient_jax.worker.script_process import run_script

NUM_DESCRIPTORS: Final = 6
"""Of an order: the answers' socket, standard output and error, and what connects a worker."""
MAX_NAMED_VARIABLES: Final = 5
"""Of those that differ, in a refusal."""
LATE_VARIABLES: Final = frozenset({b"XLA_FLAGS", b"CUDA_VISIBLE_DEVICES"})
"""Read when JAX makes a backend, and so in the worker: they say which devices it has, which change with a lost one."""

OrderConnection = Connection[ZygoteReady, ZygoteOrder]

_started_ns = time.time_ns()
"""About when this process began to import; what is written later is not what it has imported."""


def main() -> None:
    """Import, then fork a worker for each order; return in a worker only, at the end of its script."""
    owner = OrderConnection(int(sys.argv[1]), ZYGOTE_ORDER_DECODER)
    try:
        zygote = Zygote(owner)
    except EOFError:
        sys.exit(0)
    zygote.prepare()
    order = zygote.serve()
    del zygote, owner
    begin_kept_imports(order.settings.program)
    run_script(order.command)


class Zygote:
    """What has been imported for which workers, and the connections of the owner and of agents."""

    def __init__(self, owner: OrderConnection) -> None:
        """Receive what to prepare for.

        Raises:
            EOFError: the owner is gone.
        """
        self._owner = owner
        received = owner.receive()
        order = received[0].message
        assert isinstance(order, PrepareZygote), "the owner's first"
        self._order = order
        self._changes: dict[bytes, bytes] = {}
        """Environment variables that the imported libraries have set."""
        self._obstacle = ""
        self._num_modules = 0
        """How many modules have been imported from files."""
        self._agents: dict[int, OrderConnection] = {}
        """Connections to agents by their descriptors."""
        self._poll = select.poll()
        self._poll.register(owner, select.POLLIN)
        self._add_agents(received[1:])

    def prepare(self) -> None:
        """Import what workers import, unless there is an obstacle."""
        folder = find_script_folder(self._order.script)
        if not sys.flags.safe_path:
            sys.path[0] = folder  # in the place of the current folder, which `-m` puts there
        before, files = set(sys.modules), _count_descriptors()
        environment = dict(os.environb)
        num_failed = 0
        if self._order.imports is None:
            self._import_by_text()
        else:
            num_failed = self._import_as_worker(self._order.imports)
        self._changes = {k: v for k, v in os.environb.items() if environment.get(k) != v}
        self._num_modules = sum(find_file(name, module) is not None for name, module in sys.modules.items())
        self._obstacle = (
            self._obstacle or _find_module_beside(folder) or _find_own_module(before) or _find_thread()
        )
        if not self._obstacle and (late := sorted(LATE_VARIABLES & self._changes.keys())):
            names = ", ".join(map(os.fsdecode, late))
            self._obstacle = f"the imports have set {names}, of which each worker needs its own"
        if not self._obstacle and _count_descriptors() > files:
            self._obstacle = "the imports have opened files, which a worker would share with others"
        gc.collect()
        gc.freeze()  # workers share the memory of what is never collected
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the parents of workers
        # An agent has it import at the lowest priority, beside workers that train; now it must answer soon.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        with contextlib.suppress(OSError):  # the owner is gone, as `serve` sees
            self._owner.send(ZygoteReady(failed_imports=num_failed, obstacle=self._obstacle))

    def serve(self) -> ForkWorker:
        """Carry out orders until the owner is gone; return in each worker, with its order."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._agents:
                    if (order := self._handle_orders(descriptor)) is not None:
                        return order
                elif descriptor == self._owner.fileno():
                    try:
                        self._add_agents(self._owner.receive(0.0))
                    except (EOFError, FrameError, MessageError):
                        sys.exit(0)

    def _import_by_text(self) -> None:
        """Import what is found in the script's text."""
        modules, self._obstacle = find_script_imports(self._order.script)
        for name in modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:  # the name of no module, but of something in one
                continue
            except Exception as error:  # it is imported in part: the script would meet another error
                self._obstacle = f"import {name}: {type(error).__name__}: {error}"

    def _import_as_worker(self, imports: ImportsReported) -> int:
        """Import what a worker has imported; return how many modules could not be."""
        own_path = sys.path[:]
        sys.path[:] = imports.search_path
        num_failed = import_again(imports)
        self._obstacle = find_foreign_module(imports)
        sys.path[:] = own_path
        return num_failed

    def _add_agents(self, orders: list[Received[ZygoteOrder]]) -> None:
        for descriptor in (descriptor for order in orders for descriptor in order.descriptors):
            self._agents[descriptor] = OrderConnection(descriptor, ZYGOTE_ORDER_DECODER)
            self._poll.register(descriptor, select.POLLIN)

    def _handle_orders(self, descriptor: int) -> ForkWorker | None:
        """Carry out what an agent has ordered; return a worker's order in this worker, else None."""
        try:
            for received in self._agents[descriptor].receive(0.0):
                order = received.message
                if isinstance(order, ForkWorker) and self._fork(order, received):
                    return order
        except (EOFError, OSError, FrameError, MessageError):
            self._poll.unregister(descriptor)
            self._agents.pop(descriptor).close()
        return None

    def _fork(self, order: ForkWorker, received: Received[ZygoteOrder]) -> bool:
        """Fork a worker and its parent, or say why not; return whether this process is the worker."""
        try:
            descriptors = received.take_descriptors(NUM_DESCRIPTORS)
        except MessageError:  # the agent sees the end of its socket, in place of an answer
            return False
        reason = self._find_obstacle(order)
        try:
            if not reason and os.fork() == 0:
                for connection in (self._owner, *self._agents.values()):
                    connection.abandon()  # the descriptors are closed with all others
                fork_worker(order, descriptors, self._changes, self._num_modules)
                return True
        except OSError as error:
            reason = f"fork: {error}"
        answers, *others = descriptors
        agent = AnswerConnection(answers, ZYGOTE_ORDER_DECODER)
        if reason:
            with contextlib.suppress(OSError):  # the agent does not wait any more
                agent.send(ForkRefused(reason=reason))
        agent.abandon()
        for descriptor in (answers, *others):
            os.close(descriptor)
        return False

    def _find_obstacle(self, order: ForkWorker) -> str:
        """Return why a fork of this process would not be what the agent asks for; empty: it would."""
        if self._obstacle:
            return self._obstacle
        theirs, ours = order.environment, self._order.environment
        names = {*theirs, *ours} - LATE_VARIABLES
        if differing := sorted(name for name in names if theirs.get(name) != ours.get(name)):
            shown = ", ".join(os.fsdecode(name) for name in differing[:MAX_NAMED_VARIABLES])
            return f"found other environment variables than the imports were made with: {shown}"
        if changed := find_changed_module(_started_ns):
            return f"{changed} was changed after it had been imported"
        return ""


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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


if __name__ == "__main__":
    main()
