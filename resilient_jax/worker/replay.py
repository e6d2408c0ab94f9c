"""Computes steps of a job again, on this machine alone: a run without an agent that writes digests and ends early.

The train function is the job's own. The trainer loads the newest checkpoint of at most `ReplayOrder.step` steps by
itself; an own loop learns the step from `World.replay`.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from resilient_jax.errors import ResilientJaxError, StateError
from resilient_jax.ids import HostName
from resilient_jax.protocol.replay import ReplayOrder
from resilient_jax.protocol.step_digests import ReplayBegun, ReplayRefused
from resilient_jax.worker.digest_log import DigestLog, DigestObserver
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.observers import Observer
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.training_control import GenerationEnded

REPLAY_HOST = HostName("replay")


class ReplayControl(StandaloneControl):
    """Ends the run before the step after the last one of a replay."""

    def __init__(self, order: ReplayOrder, log: DigestLog) -> None:
        super().__init__(REPLAY_HOST)
        self._order = order
        self._log = log
        self._has_begun = False

    def begin_step(self, step: int) -> None:
        """Return if the step is to be computed again.

        Raises:
            GenerationEnded: the last step is done.
            StateError: the script begins behind the step.
        """
        if not self._has_begun:
            if step > self._order.step:
                raise StateError(
                    f"replay of step {self._order.step}: found a script that begins with the state after {step} steps, "
                    f"expected one of at most {self._order.step}. A loop of one's own must load a checkpoint of at "
                    "most world.replay.step steps where world.replay is not None, and call world.resume_at with it"
                )
            if step == 0 < self._order.step and not self._order.from_start:
                raise StateError(
                    f"replay of step {self._order.step}: found a script that begins with the initial state, expected "
                    f"one that loads a checkpoint of at most {self._order.step} steps. Compute all steps from the "
                    "first one with --from-start"
                )
            self._has_begun = True
            self._log.write(ReplayBegun(step=step))
        if step > self._order.last_step:
            raise GenerationEnded


def make_replay(order: ReplayOrder, info: GenerationInfo) -> tuple[ReplayControl, list[Observer]]:
    """Return the control of a replay, and the observer that writes the digests of each step."""

    def fail(why: str) -> None:
        sys.stderr.write(f"replay: the digests cannot be written: {why}\n")
        raise SystemExit(1)

    log = DigestLog(Path(order.output), REPLAY_HOST, fail)
    return ReplayControl(order, log), [DigestObserver(log, REPLAY_HOST, info, interval_steps=1)]


def run_replay(order: ReplayOrder, train: Callable[[], None]) -> None:
    """Call the train function until its last step is done, and end the process: the script must not go on.

    Raises:
        SystemExit: raised always. A `ResilientJaxError` is handed to the command, which shows it.
    """
    try:
        train()
    except GenerationEnded:
        pass
    except ResilientJaxError as error:
        log = DigestLog(Path(order.output), REPLAY_HOST, sys.stderr.write)
        log.write(ReplayRefused(why=str(error)))
        raise SystemExit(int(error.exit_code)) from error
    raise SystemExit(0)
