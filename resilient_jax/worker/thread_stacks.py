"""The stacks of this process's threads, as text; and where one of them is, in a few words."""

import contextlib
import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

from resilient_jax.threads import list_frames

MAX_STACKS_BYTES: Final = 200_000
"""Of the text of all stacks; the connection to the agent takes more, but hundreds of threads are no help."""
_PACKAGE: Final = str(Path(__file__).parents[1])
_LIBRARIES: Final = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    _PACKAGE,
    "<frozen",
)
_DEBUGGERS: Final = ("/bdb.py", "/pdb.py", "/pydevd.py", "/debugpy/")


def describe_place(thread: int) -> str:
    """Return where a thread is: the innermost line that is neither of this package nor of a library, if there is one.

    Args:
        thread: its `ident`.

    Returns:
        A text such as "`load_batch`, line 40 of train.py".
    """
    frames = list_frames(thread)
    if not frames:
        return "a thread that has ended"
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)]
    return _describe(own[0] if own else frames[0])


def _describe(frame: FrameType) -> str:
    return f"`{frame.f_code.co_name}`, line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)}"


def format_stacks() -> str:
    """Return the stacks of all threads of this process but the calling one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    caller, main = threading.get_ident(), threading.main_thread().ident
    parts: list[str] = []
    for ident in sorted(sys._current_frames(), key=lambda one: one != main):
        if ident != caller:
            frames = [(frame, frame.f_lineno) for frame in reversed(list_frames(ident))]
            text = "".join(traceback.StackSummary.extract(frames).format())
            parts.append(f"thread {names.get(ident, ident)}:\n{text}")
    return "\n".join(parts)[:MAX_STACKS_BYTES]


def is_debugged() -> bool:
    """Return whether a debugger holds this process: one that traces it, or one in a thread of its own."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("TracerPid:") and int(line.split()[1]):
                return True
    return any(
        any(part in frame.f_code.co_filename for part in _DEBUGGERS)
        for thread in sys._current_frames()
        for frame in list_frames(thread)
    )
