"""Distinguishes errors that a lost peer causes from others, and defines the errors of this package."""

import re
from collections.abc import Iterator
from typing import Final

from resilient_jax.errors import PeerError
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError


class FormingInterrupted(PeerError):
    """`interrupt_forming` was called while this process was joining a world; join the next one."""


class FormingFailed(PeerError):
    """The world was not complete in time, or a step of joining it failed."""


class ServiceEnded(FormingFailed):
    """A collective was needed in a world whose coordination service has ended; nothing else is wrong."""


class CliqueAborted(FormingFailed):
    """A clique is needed that was aborted earlier, so that its world cannot form it again; nothing else is wrong."""


class CollectiveGivenUp(PeerError):
    """The collective did not return although its connections were shut; its world cannot be used again."""


class RehearsalFailed(PeerError):
    """A part of a step cannot be rehearsed without the other hosts."""


_PEER_STATUS: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
"""Status codes that XLA gives only to waits on other processes."""

_PATTERN: Final = re.compile(
    r"gloo|connection (closed|reset|refused)|broken pipe|socket closed|"
    r"nccl|communicator|clique|coordination service|rendezvous|incarnation",
    re.IGNORECASE,
)
_AMBIGUOUS_STATUS: Final = ("UNKNOWN", "INTERNAL", "FAILED_PRECONDITION", "ALREADY_EXISTS")
_UNRELATED_STATUS: Final = (
    "RESOURCE_EXHAUSTED",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "OUT_OF_RANGE",
    "NOT_FOUND",
)


def is_collective_failure(error: BaseException) -> bool:
    """Return whether a dead peer, an aborted collective or a lost service caused `error`, or one in its chain.

    False for the user's own errors, out-of-memory, invalid arguments and shapes. The decision is made from messages and
    status codes: a wrong decision in either direction costs a re-form or a report, never a wrong result.
    """
    return any(_is_collective_failure(error) for error in _chain(error))


def _is_collective_failure(error: BaseException) -> bool:
    if isinstance(error, FormingInterrupted | FormingFailed | CollectiveGivenUp):
        return True
    # jit's C++ fast path raises the same messages as a ValueError or RuntimeError.
    if not isinstance(error, JaxRuntimeError | ValueError | RuntimeError):
        return False
    text = str(error)
    status = text.partition(":")[0].strip()
    if status in _UNRELATED_STATUS:
        return False
    if status in _PEER_STATUS:
        return True
    return status in _AMBIGUOUS_STATUS and _PATTERN.search(text) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
