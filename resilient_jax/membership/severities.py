"""The table of severities: what was seen, what is done about it, and what next if that did not help. Pure.

Three levels, as in Unicron (arXiv 2401.00134), and the end of the job after them: to retry in place costs a step at
most, to restart a worker some seconds, to take a host out its share of the work. Each action is tried a number of
times, counted from the last progress or within a window of time; then comes the next one.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Final


class Action(enum.StrEnum):
    """What is done; from the gentlest to the hardest."""

    RETRY_IN_PLACE = "retry in place"
    """Severity 3: the same workers train again from the last committed step."""
    RESTART_WORKER = "restart the worker"
    """Severity 2: its process is ended, and another takes its place; or that of a host that was lost and comes back."""
    TAKE_DEVICE_OUT = "take the device out"
    """Severity 2, too: the worker is started again without the device, which is quarantined; its host is a member."""
    TAKE_HOST_OUT = "take the host out"
    """Severity 1: the job goes on without the host, which is quarantined."""
    STOP_JOB = "stop the job"
    """None of these helps."""


class Evidence(enum.StrEnum):
    """What was seen."""

    COLLECTIVE_FAILED = "a collective failed although no host died"
    COLLECTIVE_HANGS = "all hosts are in a collective, and none leaves it"
    WORKER_HANGS = "a worker keeps the others waiting"
    ALL_WORKERS_HANG = "no worker makes progress"
    WORKER_DIED = "a worker's process ended, or could not be started"
    HOST_LOST = "a host was lost without a notice"
    RAISED = "a host's script raised an error, or ended too soon"
    GPU_FAILED = "a GPU must not train any more"
    HOSTS_SEPARATED = "two hosts cannot reach each other, although both reach the store"


class Tries(enum.StrEnum):
    """A number of tries that is a setting of the job, by its key."""

    COLLECTIVE = "max_collective_retries"
    RESTARTS = "max_restarts"
    HOST_LOSSES = "max_host_losses"
    ERROR_RESTARTS = "max_error_restarts"


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """An action, and how often it is tried before the next one; None: it is the last."""

    action: Action
    tries: Tries | int | None = None


_WITHOUT_PROGRESS = (
    Level(Action.RETRY_IN_PLACE, Tries.COLLECTIVE),
    Level(Action.TAKE_HOST_OUT, 1),
    Level(Action.STOP_JOB),
)
_OF_A_WORKER = (Level(Action.RESTART_WORKER, Tries.RESTARTS), Level(Action.TAKE_HOST_OUT))

ESCALATIONS: Final[Mapping[Evidence, tuple[Level, ...]]] = {
    Evidence.COLLECTIVE_FAILED: _WITHOUT_PROGRESS,
    Evidence.COLLECTIVE_HANGS: _WITHOUT_PROGRESS,
    Evidence.WORKER_HANGS: _OF_A_WORKER,
    Evidence.ALL_WORKERS_HANG: _OF_A_WORKER,
    Evidence.WORKER_DIED: _OF_A_WORKER,
    Evidence.HOST_LOST: (Level(Action.RESTART_WORKER, Tries.HOST_LOSSES), Level(Action.TAKE_HOST_OUT)),
    Evidence.RAISED: (Level(Action.RESTART_WORKER, Tries.ERROR_RESTARTS), Level(Action.TAKE_HOST_OUT)),
    Evidence.GPU_FAILED: (Level(Action.TAKE_DEVICE_OUT, 1), Level(Action.TAKE_HOST_OUT)),
    Evidence.HOSTS_SEPARATED: (Level(Action.TAKE_HOST_OUT),),
}
"""A worker that hangs is ended, and so a worker that died: both count against the budget of its host. Where a host
cannot do without a GPU, to take that out counts as tried. When an error of a script's is the program's, and ends the
job instead, is in `raised_errors`."""


def choose_action(evidence: Evidence, num_before: int, settings: Mapping[Tries, int]) -> Action:
    """Return what to do about something that was seen.

    Args:
        num_before: how often the evidence was acted on already, without success.
        settings: the numbers of tries that are settings.
    """
    levels = ESCALATIONS[evidence]
    left = num_before
    for level in levels:
        if level.tries is None:
            return level.action
        tries = level.tries if isinstance(level.tries, int) else settings[level.tries]
        if left < tries:
            return level.action
        left -= tries
    return levels[-1].action
