"""What a fork of a zygote becomes: the parent of one worker, and that worker.

A zygote may die, and its workers live on. So a worker is not its child, but that of a process with no other task: the
parent reports the worker's end to the agent, and ends the worker when the agent is gone. The kernel ends the worker
when its parent dies.
"""

import contextlib
import ctypes
import os
import select
import signal
import traceback
from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np

from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.worker_messages import (
    AGENT_CONNECTION_VARIABLE,
    DEATH_PIPE_VARIABLE,
    SNAPSHOT_CONNECTION_VARIABLE,
    WORKER_SETTINGS_VARIABLE,
    encode_settings,
)
from resilient_jax.protocol.zygote_messages import (
    ZYGOTE_ORDER_DECODER,
    ForkRefused,
    ForkWorker,
    WorkerEnded,
    WorkerForked,
    ZygoteAnswer,
    ZygoteOrder,
)

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PARENT_NAME: Final = b"worker-parent"

AnswerConnection = Connection[ZygoteAnswer, ZygoteOrder]

_libc = ctypes.CDLL(None, use_errno=True)


def fork_worker(
    order: ForkWorker, descriptors: tuple[int, ...], changes: dict[bytes, bytes], num_modules: int
) -> None:
    """Fork the worker of this order, and return in the worker only; this process, a fork of a zygote, is its parent.

    Args:
        descriptors: descriptors of the order.
        changes: environment variables that imports have set.
        num_modules: modules that have been imported.
    """
    try:
        os.setsid()  # a signal to the zygote's group is none to this process
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # the zygote's may be the lowest
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        _close_others(descriptors)
        answers, *theirs = descriptors
        agent = AnswerConnection(answers, ZYGOTE_ORDER_DECODER)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            agent.send(ForkRefused(reason=f"fork: {error}"))
            os._exit(1)
        if pid:
            _watch_worker(pid, agent, theirs, num_modules)
        agent.abandon()
        _become_worker(order, order.environment | changes, theirs, parent)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _watch_worker(
    pid: int, agent: AnswerConnection, descriptors: Sequence[int], num_modules: int
) -> NoReturn:
    """Report that the worker runs, and how it ends; end it when the agent is gone."""
    try:
        for descriptor in descriptors:
            os.close(descriptor)  # of the worker: its death closes them
        _libc.prctl(PR_SET_NAME, PARENT_NAME)
        agent.send(WorkerForked(pid=pid, parent=os.getpid(), num_modules=num_modules))
        process = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(agent, select.POLLIN)
        if process in {descriptor for descriptor, _ in poll.poll()}:
            ended = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOWAIT)
            assert ended is not None, "it has ended"
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            agent.send(WorkerEnded(exit_code=code))
            agent.receive()  # until the agent has ended what is left of the worker's process group
    except (EOFError, OSError):
        pass  # the agent is gone
    finally:
        _kill(pid)
        os.waitpid(pid, 0)
        os._exit(0)


def _kill(pid: int) -> None:
    """Send SIGKILL to a child and to its process group, which it may not lead yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _become_worker(
    order: ForkWorker, environment: dict[bytes, bytes], descriptors: Sequence[int], parent: int
) -> None:
    """Make this process, which has just been forked, what a process is that an agent starts as a worker."""
    os.setsid()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl
    # For `ps` and `top`; the command line stays that of the zygote.
    _libc.prctl(PR_SET_NAME, os.fsencode(os.path.basename(order.command[0])))
    output, error, *connections = descriptors
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(error, 2)
    _close_others(connections)
    os.environb.clear()
    os.environb.update(environment)
    agent, snapshots, death_pipe = connections
    os.environ[AGENT_CONNECTION_VARIABLE] = str(agent)
    os.environ[SNAPSHOT_CONNECTION_VARIABLE] = str(snapshots)
    os.environ[DEATH_PIPE_VARIABLE] = str(death_pipe)
    os.environ[WORKER_SETTINGS_VARIABLE] = encode_settings(order.settings)
    np.random.seed()  # else all workers would draw the same numbers; `random` takes care of itself


def _close_others(kept: Sequence[int]) -> None:
    """Close all descriptors but the standard ones and these."""
    for name in os.listdir("/proc/self/fd"):
        if (descriptor := int(name)) not in {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)
