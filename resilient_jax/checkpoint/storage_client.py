"""The worker's end of its storage process: requests with a time limit, to a process that is replaced when it dies."""

import dataclasses
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.checkpoint.messages import FailureReply, Reply, Request
from resilient_jax.checkpoint.storage_connection import StorageConnection
from resilient_jax.errors import CheckpointFailed

POLL_INTERVAL_S: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyWait:
    """How long to wait for a reply: the start of the work, and a check that may end the wait early."""

    since_s: float
    check: Callable[[], None] | None


class StorageClient:
    """Sends requests to a storage process, which starts with the first one.

    Args:
        timeout_s: limit of one request; after this time the process is ended, and the reply is a failure.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connection: StorageConnection | None = None

    def send(self, request: Request, descriptor: int | None = None) -> None:
        """Send a request; a process that has died is replaced.

        Raises:
            CheckpointFailed: the process died meanwhile.
        """
        if self._connection is not None and self._connection.has_ended:
            self.close()
        if self._connection is None:
            self._connection = StorageConnection()
        self._connection.send(request, descriptor)

    def request(self, request: Request, wait: ReplyWait, descriptor: int | None = None) -> Reply:
        """Return the reply to a request. If the wait is aborted, the process ends, because it owes a reply."""
        try:
            self.send(request, descriptor)
            while (reply := self.receive(POLL_INTERVAL_S, wait.since_s)) is None:
                if wait.check is not None:
                    wait.check()
        except CheckpointFailed as error:
            self.close()
            reply = FailureReply(reason=str(error))
        except BaseException:
            self.close()
            raise
        return reply

    def receive(self, timeout_s: float, started_s: float) -> Reply | None:
        """Return the reply to the request in flight; the death of the process and a timeout are failures, too."""
        assert self._connection is not None, "a request is in flight"
        try:
            reply = self._connection.receive(timeout_s)
        except CheckpointFailed as error:
            self.close()
            return FailureReply(reason=str(error))
        if reply is None and time.monotonic() - started_s > self._timeout_s:
            self.close()
            return FailureReply(reason=f"it took more than {self._timeout_s:g} s, and was canceled")
        return reply

    def close(self) -> None:
        """Kill the process, if there is one; the next request starts another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
