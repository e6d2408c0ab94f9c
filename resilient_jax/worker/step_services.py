"""What a step that is not made by `World.accumulate_microbatches` needs of the worker, such as that of a pipeline."""

import dataclasses
from collections.abc import Callable
from typing import Any

from resilient_jax.ids import HostName
from resilient_jax.transport.mail_service import MailService
from resilient_jax.worker.committed_state import UnfinishedStep
from resilient_jax.worker.mail_opening import MailOpener


@dataclasses.dataclass(frozen=True, slots=True)
class StepServices:
    """The services of one generation.

    Attributes:
        host: of this worker.
        hit_failpoint: `hit_failpoint(failpoint, index)`; a place where a test may hold or kill this worker.
    """

    host: HostName
    hit_failpoint: Callable[..., Any]
    _mail: MailOpener
    _unfinished: list[UnfinishedStep]

    @property
    def wait_timeout_s(self) -> float:
        """How long a step waits for a message of a peer at most: as long as a collective does."""
        return self._mail.wait_timeout_s

    def open_mail(self) -> MailService:
        """Return a new mailbox of this host. It is the caller's, and outlives the world."""
        return self._mail.open(self.host)

    def register_unfinished(self, step: UnfinishedStep) -> None:
        """Have the arrays of a step, which the caller keeps over generations, dropped when the devices go away."""
        self._unfinished.append(step)
