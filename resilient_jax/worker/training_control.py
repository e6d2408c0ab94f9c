"""What a session needs of whatever controls it: an agent, or nothing."""

from collections.abc import Callable
from typing import Protocol

from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.protocol.worker_messages import StepCommitted
from resilient_jax.protocol.worker_report import StateDoubt, WorkerFailure, WorkerFailureKind
from resilient_jax.worker.worker_protocol import HeldPause, Transition


class GenerationEnded(BaseException):
    """Unwinds the user's train function: its generation has ended.

    Not an `Exception`, so that an `except Exception` in a training loop does not swallow it.
    """


class ErrorSwallowed(BaseException):
    """The script catches an error of its own around its steps, each time that it comes; see `loop_tries`.

    Not an `Exception`: it would be caught as well. The worker reports it as the script's error.
    """


class CorruptionFound(GenerationEnded):
    """Unwinds the user's train function: a host has computed wrongly, and states that were committed are in doubt.

    Args:
        trusted_step: states of at most so many steps are not in doubt.
        is_this_host: whether this host is one of them.
    """

    def __init__(
        self, message: str, *, trusted_step: int, corrupt_hosts: tuple[HostName, ...], is_this_host: bool
    ) -> None:
        super().__init__(message)
        self.trusted_step = trusted_step
        self.is_this_host = is_this_host
        self.failure = WorkerFailure(
            kind=WorkerFailureKind.CORRUPTION,
            text=message,
            doubt=StateDoubt(trusted_step=trusted_step, corrupt_hosts=corrupt_hosts),
        )


class TrainingControl(Protocol):
    """What a session needs of the agent; `AgentConnection` is one, `StandaloneControl` another."""

    def begin_step(self, step: int) -> None:
        """Return when `step` may start; raise GenerationEnded if it may not."""
        ...

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if the generation has ended."""
        ...

    def report_commit(self, commit: StepCommitted, *, holds_state: bool, part: StatePart | None) -> None:
        """Report that a step is committed, of whose state this host has all (`holds_state`) or a part."""
        ...

    def report_found(self, change: Callable[..., Transition], found: object) -> None:
        """Report what was found beside the training, by a transition of `worker_protocol`. Thread-safe."""
        ...

    @property
    def is_leaving(self) -> bool:
        """Whether the job ends after the step under way; asked by a training that saves a checkpoint then."""
        ...

    @property
    def held_pause(self) -> HeldPause | None:
        """The pause that is to come when blocks are copied for the members after it; None: there is none."""
        ...

    def answer_pause(self, generation: GenerationNumber) -> None:
        """Let the pause before a generation come, between two steps: blocks are copied, as far as they are."""
        ...

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Write an event to the host's log and return it."""
        ...
