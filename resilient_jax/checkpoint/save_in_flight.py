"""The save that a storage process works on, and how the last one ended."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from resilient_jax.checkpoint.directory_listing import find_tree_folder
from resilient_jax.checkpoint.messages import FailureReply, Reply, SaveReply, SaveShare
from resilient_jax.checkpoint.part_folder import PartFolder
from resilient_jax.checkpoint.storage_client import StorageClient
from resilient_jax.events import EventKind

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S: Final = 5.0
"""For the words of a process that has written its part."""
RecordEvent = Callable[..., object]
"""Takes an `EventKind` and details."""


class SaveInFlight:
    """At most one save at a time, of one directory.

    Args:
        client: client of the process that writes and removes checkpoints.
        distrusted: steps whose checkpoints could not be read; a step that is saved anew is removed.

    Attributes:
        step: step of the save in flight; None: no save is.
        share: share of the save in flight, or else of the last save; None: there was none.
        failure: the reason why the last save failed; None: that save did not fail.
    """

    def __init__(self, directory: Path, client: StorageClient, distrusted: set[int]) -> None:
        self._directory = directory
        self._distrusted = distrusted
        self._client = client
        self._started_s = 0.0
        self.step: int | None = None
        self.share: SaveShare | None = None
        self.failure: str | None = None

    def begin(self, step: int, share: SaveShare, started_s: float) -> None:
        """Note that a save has begun, at a time in monotonic seconds."""
        self.step, self.share, self._started_s = step, share, started_s

    def must_skip(self, step: int, record_event: RecordEvent) -> bool:
        """Return whether a save of this step must be skipped, since one is still in flight. That is an event, too."""
        self.wait(record_event, timeout_s=0.0)
        if self.step is None:
            return False
        logger.warning("step %d: no checkpoint, that of step %d is not done", step, self.step)
        record_event(
            EventKind.CHECKPOINT_SKIPPED,
            step=step,
            in_flight=self.step,
            in_flight_s=time.monotonic() - self._started_s,
        )
        return True

    def list_missing_parts(self) -> list[str]:
        """Return the hosts that the save in flight waits for: of parts that are not complete, or the first one."""
        if self.step is None or self.share is None:
            return []
        parts = PartFolder(self._directory, self.step, self.share)
        # Once the checkpoint has its name its folder goes.
        is_over = not parts.exists and find_tree_folder(self._directory / str(self.step)) is not None
        return [] if is_over and self.share.number == 0 else parts.list_missing()

    def wait(self, record_event: RecordEvent, timeout_s: float) -> None:
        """Wait for the end of the save in flight, if there is one, and record it."""
        if self.step is not None:
            reply = self._client.receive(timeout_s, self._started_s)
            if reply is not None:
                self.end(reply, record_event)

    def give_up(self, why: str, record_event: RecordEvent) -> None:
        """End the save in flight, if there is one: a failure for no fault of the storage, so another may be begun.

        A part that is written is no failure: its process is about to say so.
        """
        if self._is_part_written:
            self.wait(record_event, REPLY_TIMEOUT_S)
        if self.step is not None:
            self._client.close()
            self.end(FailureReply(reason=why), record_event)
            self.failure = None

    @property
    def _is_part_written(self) -> bool:
        """Whether the save in flight is of a part, another than the first, that is on storage."""
        if self.step is None or self.share is None or self.share.number == 0:
            return False
        parts = PartFolder(self._directory, self.step, self.share)
        if parts.exists:
            return parts.find_result(self.share.number) is not None
        return find_tree_folder(self._directory / str(self.step)) is not None

    def end(self, reply: Reply, record_event: RecordEvent) -> None:
        """Note the end of the save in flight, and record it; that of a part only if it failed."""
        assert self.step is not None, "it is in flight"
        missing = self.list_missing_parts() if isinstance(reply, FailureReply) else []
        step, self.step = self.step, None
        path = str(self._directory / str(step))
        if isinstance(reply, SaveReply):
            self.failure = None
            self._distrusted.discard(step)  # it was written anew, or found to be readable
            if self.share is None or self.share.number == 0:
                record_event(
                    EventKind.CHECKPOINT_SAVED,
                    step=step,
                    path=path,
                    bytes=reply.nbytes,
                    seconds=reply.duration_s,
                    existed=reply.existed,
                )
            return
        reason = reply.reason if isinstance(reply, FailureReply) else "a reply to another request"
        if self.share is not None and self.share.number > 0:
            # In place of a process that could not.
            PartFolder(self._directory, step, self.share).put_error(self.share.number, reason)
        elif missing:
            reason += f"; without the parts of {', '.join(missing)}"
        self.failure = f"step {step}: {reason}"
        logger.warning("the checkpoint %s could not be written: %s", path, reason)
        record_event(EventKind.CHECKPOINT_FAILED, step=step, path=path, reason=reason)
