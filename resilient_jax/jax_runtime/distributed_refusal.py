"""Refuses `jax.distributed.initialize` in a process that an agent started.

The hosts of a job join one world after another, through `distributed.connect`. A script that was written for several
hosts calls JAX's function first: it would wait minutes for peers that never come, or occupy the place of the world.
"""

import logging
import os
from typing import Any, Final, NoReturn

import jax

from resilient_jax.errors import CallerError
from resilient_jax.protocol.worker_messages import AGENT_CONNECTION_VARIABLE

logger = logging.getLogger(__name__)

REMEDY: Final = (
    "The agent (`resilient-jax launch`, `resilient-jax agent`) says which hosts take part, and rj.run or fit connects "
    "them, again after every change. Remove the call"
)


def refuse_under_agent() -> None:
    """Make JAX's `initialize` raise `CallerError`, and its `shutdown` do nothing, if an agent started this process."""
    if AGENT_CONNECTION_VARIABLE in os.environ:
        jax.distributed.initialize = _refuse_initialize
        jax.distributed.shutdown = _ignore_shutdown


def check_not_initialized() -> None:
    """Check that JAX is not connected to other processes.

    Raises:
        CallerError: the script has called `jax.distributed.initialize`.
    """
    if jax.distributed.is_initialized():
        raise CallerError(
            "run: found that this script has called jax.distributed.initialize, expected it not to: this is done for "
            f"you. {REMEDY}"
        )


def _refuse_initialize(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - whatever JAX's function takes
    raise CallerError(
        f"jax.distributed.initialize: found a call under an agent, expected none: this is done for you. {REMEDY}"
    )


def _ignore_shutdown() -> None:
    # No error: at the end of a script it would only spoil a training that is done.
    logger.warning(
        "jax.distributed.shutdown: does nothing under an agent, which ends the connections. Remove the call"
    )
