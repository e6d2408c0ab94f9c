"""The gRPC methods of an agent, by which commands anywhere look at its host, and their messages."""

from typing import Annotated, Final

import msgspec

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.run_directory import HostLog
from resilient_jax.telemetry.log_reader import LogPart
from resilient_jax.transport.method import Method

SERVICE: Final = "rj.agent"
MAX_LINES: Final = 10_000
"""More lines are more bytes than a part of a log may have, as a rule."""


class ReadLog(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a part of a log of the agent's host.

    Attributes:
        lines: number of the last lines, if there is no `offset`.
        offset: where to go on, in bytes, as the part before said; None: the request is for the last lines.
    """

    log: HostLog
    lines: Annotated[int, msgspec.Meta(ge=0, le=MAX_LINES)]
    offset: Annotated[int, msgspec.Meta(ge=0)] | None


class SendSignal(msgspec.Struct, frozen=True, kw_only=True):
    """Orders an agent to end, or to stop, processes of its host.

    Attributes:
        agent_id: id of the agent that is meant; another agent, which has the address by now, refuses.
        component: component whose processes are meant, the agent included.
        is_stop: True: SIGSTOP instead of SIGKILL.
    """

    agent_id: str
    component: JobComponent
    is_stop: bool


class SignalReceivers(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that get the signal when this answer has arrived and its reader ends the call."""

    pids: tuple[int, ...]


READ_LOG: Final = Method("read_log", ReadLog, LogPart)
SEND_SIGNAL: Final = Method("send_signal", SendSignal, SignalReceivers, is_streaming=True)
"""A stream of one answer: an agent that ends itself could not be sure otherwise that its answer has arrived."""
