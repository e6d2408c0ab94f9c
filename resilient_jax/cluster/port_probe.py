"""What answers at the port of another host: a process, its machine alone, or nobody."""

import asyncio
import dataclasses
import enum
from collections.abc import Collection

from resilient_jax.transport.server_address import parse_address


class PortAnswer(enum.Enum):
    """How an attempt to connect ended. The kernel accepts also for a process that is stopped, or busy."""

    ACCEPTED = enum.auto()
    REFUSED = enum.auto()
    """The machine lives, and no process listens there."""
    NONE = enum.auto()
    """The machine is dead, or cut off."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """How often a port is tried, how long each try may take, and the time between two."""

    num_tries: int
    timeout_s: float
    interval_s: float


async def probe_port(endpoint: str, limits: ProbeLimits, doubted: Collection[PortAnswer]) -> PortAnswer:
    """Return the first answer that is not in `doubted`, or the last: those are asked for once more."""
    host, port = parse_address(endpoint)
    answer = await _connect(host, port, limits.timeout_s)
    for _ in range(limits.num_tries - 1):
        if answer not in doubted:
            break
        await asyncio.sleep(limits.interval_s)
        answer = await _connect(host, port, limits.timeout_s)
    return answer


async def _connect(host: str, port: int, timeout_s: float) -> PortAnswer:
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return PortAnswer.REFUSED
    except (OSError, TimeoutError):
        return PortAnswer.NONE
    writer.close()
    return PortAnswer.ACCEPTED
