"""How often in a row a script left the loop over its steps by an exception that it catches itself, and began it again.

Such a script hides its error from the job: nobody is told, and nothing ends it. Its next tries wait, longer each time:
what it prints is bounded, and the end of the generation (a peer that died) can interrupt it. Then an error that no
`except Exception` catches says which line of the script it was.
"""

import time
from pathlib import Path
from typing import Final

from resilient_jax.threads import find_calling_line
from resilient_jax.worker.training_control import ErrorSwallowed, TrainingControl

DELAYS_S: Final = (0.5, 1.5, 3.0)
"""Before the second try, the third, and the error: together more than a lease, after which a lost host is known."""
LOOK_INTERVAL_S: Final = 0.05
"""How soon a wait ends whose generation has ended."""
_PACKAGE: Final = str(Path(__file__).parents[1])


class LoopTries:
    """The tries of one generation."""

    def __init__(self, control: TrainingControl) -> None:
        self._control = control
        self._committed = -1
        self._count = 0
        self._place = ""

    def note_left(self, committed: int) -> None:
        """Note that the loop was left in a step without its commit; so many were committed before."""
        self._count = self._count + 1 if committed == self._committed else 1
        self._committed, self._place = committed, find_calling_line(_PACKAGE)

    def begin(self, committed: int) -> None:
        """Wait before the loop begins once more with the same step.

        Raises:
            ErrorSwallowed: the loop has begun with this step too often.
        """
        if committed != self._committed:
            return
        deadline_s = time.monotonic() + DELAYS_S[self._count - 1]
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._control.raise_if_ended()
            time.sleep(min(left_s, LOOK_INTERVAL_S))
        if self._count == len(DELAYS_S):
            raise ErrorSwallowed(
                f"steps: found a loop that was left {self._count} times in a row in the step after {committed} "
                f"commits, by an exception at {self._place} that the script catches; expected one that leaves "
                "`train`. Raise it again where it is caught: this host's worker is then started again, or the job ends "
                "with that error"
            )
