"""How a standby becomes the worker: it waits for the order of its agent, then has what a worker is started with."""

import os
import time
from collections.abc import Sequence
from typing import NoReturn

from resilient_jax.errors import MessageError
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.standby_messages import (
    PromoteStandby,
    StandbyMessage,
    StandbyOrder,
    StandbyPromoted,
    StandbyReady,
    StandbyUnfit,
)
from resilient_jax.protocol.worker_messages import (
    AGENT_CONNECTION_VARIABLE,
    DEATH_PIPE_VARIABLE,
    SNAPSHOT_CONNECTION_VARIABLE,
    WORKER_SETTINGS_VARIABLE,
    WorkerSettings,
    encode_settings,
)
from resilient_jax.worker.imported_modules import find_changed_module
from resilient_jax.worker.kept_imports import are_imports_kept

StandbyConnection = Connection[StandbyMessage, StandbyOrder]

UNFIT_EXIT_CODE = 1

_started_ns = time.time_ns()
"""About when this process began to import; what is written later is not what it has imported."""


def become_worker(connection: StandbyConnection, num_failed_imports: int) -> None:
    """Report that this standby is ready, and return when it is the worker.

    Args:
        connection: connection to the agent; closed by this function.
    """
    connection.send(StandbyReady(failed_imports=num_failed_imports))
    try:
        (received,) = connection.receive()
    except EOFError:
        os._exit(UNFIT_EXIT_CODE)  # the agent is gone; no code of the script's may run
    if changed := find_changed_module(_started_ns, only_installed=are_imports_kept()):
        refuse_promotion(connection, f"{changed} was changed after this process had started")
    try:
        descriptors = received.take_descriptors(3)
    except MessageError as error:
        refuse_promotion(connection, str(error))
    order = received.message
    assert isinstance(order, PromoteStandby), "sent once, after the first order"
    os.environb.clear()
    os.environb.update(order.environment)
    set_worker_variables(descriptors, order.settings)
    connection.send(StandbyPromoted())
    connection.close()


def set_worker_variables(descriptors: Sequence[int], settings: WorkerSettings) -> None:
    """Set what a worker finds in its environment.

    Args:
        descriptors: descriptors of the connections to agent and snapshot server, and of the death pipe.
    """
    agent, snapshots, death_pipe = descriptors
    os.environ[AGENT_CONNECTION_VARIABLE] = str(agent)
    os.environ[SNAPSHOT_CONNECTION_VARIABLE] = str(snapshots)
    os.environ[DEATH_PIPE_VARIABLE] = str(death_pipe)
    os.environ[WORKER_SETTINGS_VARIABLE] = encode_settings(settings)


def refuse_promotion(connection: StandbyConnection, reason: str) -> NoReturn:
    """Tell the agent why this process cannot be the worker, and end it."""
    connection.send(StandbyUnfit(reason=reason))
    os._exit(UNFIT_EXIT_CODE)
