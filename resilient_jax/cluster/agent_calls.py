"""Calls of the agents of a job by a command that runs anywhere: all at once, each with a deadline of its own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from resilient_jax.cluster.agent_messages import READ_LOG, SEND_SIGNAL, SERVICE, ReadLog, SendSignal
from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.errors import PeerError, PeerUnreachable
from resilient_jax.ids import HostName
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.telemetry.log_reader import LogPart
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials

ANSWER_TIMEOUT_S = 5.0
MAX_CALLS = 64
"""At a time: a command with a connection to each of some thousand hosts would run out of descriptors."""

AnswerT = TypeVar("AnswerT")


async def call_agents(
    hosts: Sequence[HostStatus],
    credentials: Credentials,
    call: Callable[[Channel, HostStatus], Awaitable[AnswerT]],
) -> dict[HostName, AnswerT | PeerError]:
    """Return what the agent of each host answered, or why it did not.

    Raises:
        Unauthenticated: an agent does not accept the caller's token.
        ConfigError: a TLS file cannot be read.
    """
    slots = asyncio.Semaphore(MAX_CALLS)

    async def call_one(host: HostStatus) -> AnswerT | PeerError:
        async with slots, Channel(host.agent.endpoint, credentials) as channel:
            try:
                return await call(channel, host)
            except PeerError as error:
                return error

    answers = await asyncio.gather(*map(call_one, hosts))
    return {host.host: answer for host, answer in zip(hosts, answers, strict=True)}


async def read_log(channel: Channel, request: ReadLog) -> LogPart:
    """Return a part of a log of the agent's host.

    Raises:
        PeerError: the agent did not answer in time, or refused.
    """
    return await channel.call(SERVICE, READ_LOG, request, timeout_s=ANSWER_TIMEOUT_S)


async def send_signal(
    channel: Channel, host: HostStatus, component: JobComponent, *, is_stop: bool
) -> tuple[int, ...]:
    """Have an agent end, or stop, a component of its host; return the processes.

    They get the signal when the agent's answer has arrived here.

    Raises:
        PeerError: the agent did not answer in time, or refused.
    """
    request = SendSignal(agent_id=host.agent.id, component=component, is_stop=is_stop)
    answers = channel.stream(SERVICE, SEND_SIGNAL, request, timeout_s=ANSWER_TIMEOUT_S)
    async with contextlib.aclosing(answers):
        async for answer in answers:
            return answer.pids
    raise PeerUnreachable(f"{channel.address} ended its answer before it began")
