"""Looks whether files of the job's program have changed on disk since the job began.

That changes nothing in the job: a process that starts later runs the copies in the run folder. A user who edits
a script learns here that the job does not run what is edited.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.kept_program import KeptFile, KeptProgram, find_changed_files
from resilient_jax.errors import KeptFileDamaged
from resilient_jax.events import EventKind

LOOK_INTERVAL_S: Final = 3.0
"""A look at a file that did not change is one system call; a person who has saved a file asks for the status later."""
MAX_NAMED: Final = 3
"""Files that a status names; another version of a program may have changed all of them."""


class ProgramWatch:
    """The files of the program that are not on disk any more as the job has them.

    Attributes:
        changed: a text such as "/home/me/train.py, /home/me/model.py"; empty if no file has changed.
    """

    def __init__(self, context: AgentContext, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change of `changed`."""
        self._admission = context.admission
        self._log = context.log
        self._on_change = on_change
        self._unchanged: dict[str, tuple[int, ...]] = {}
        self.changed = ""

    async def run(self) -> None:
        """Look again and again, in a thread: the files may be on a file system that does not answer."""
        while (program := self._admission.kept) is not None:
            # What cannot be made again says the next start of a worker.
            with contextlib.suppress(OSError, KeptFileDamaged):
                await asyncio.to_thread(program.restore)
                self._record(program, await asyncio.to_thread(find_changed_files, program, self._unchanged))
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _record(self, program: KeptProgram, found: list[KeptFile]) -> None:
        changed = describe_files([kept.file for kept in found])
        if changed != self.changed:
            self.changed = changed
            self._on_change()
        for kept in found:
            if program.note_change(kept.file):
                self._log.record(
                    EventKind.SCRIPT_CHANGED,
                    file=kept.file,
                    kept=program.find_copy(kept),
                )


def describe_files(files: list[str]) -> str:
    """Return the first files, and how many more there are."""
    more = [f"{len(files) - MAX_NAMED} more"] if len(files) > MAX_NAMED else []
    return ", ".join([*files[:MAX_NAMED], *more])
