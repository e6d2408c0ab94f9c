"""The stacks of this process's threads, as text; and where one of them is, in a few words."""

import contextlib
import os
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from resilient_jax.threads import Call, read_stacks

MAX_STACKS_BYTES: Final = 200_000
"""Of the text of all stacks; the connection to the agent takes more, but hundreds of threads are no help."""
_PACKAGE: Final = str(Path(__file__).parents[1])
_LIBRARIES: Final = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    _PACKAGE,
    "<frozen",
)
_BARRIERS: Final = {
    "/orbax/checkpoint/": ("Orbax", {"sync_global_processes", "initialize_runtime_to_distributed_ids"}),
    "/jax/experimental/multihost_utils.py": (
        "JAX",
        {"sync_global_devices", "broadcast_one_to_all", "process_allgather", "assert_equal"},
    ),
}
"""Functions of libraries that return when all processes of the world have called them, by a part of their paths."""
_DEBUGGERS: Final = ("/bdb.py", "/pdb.py", "/pydevd.py", "/debugpy/")


def describe_place(thread: int) -> str:
    """Return where a thread is: the innermost line that is neither of this package nor of a library, if there is one.

    Args:
        thread: `Thread.ident` of the thread.

    Returns:
        A text such as "`load_batch`, line 40 of train.py". If the thread waits for all hosts in a library, the text
            says so, too.
    """
    calls = read_stacks().get(thread, [])
    if not calls:
        return "a thread that has ended"
    own = [call for call in calls if not call.path.startswith(_LIBRARIES)]
    place, barrier = _describe(own[0] if own else calls[0]), _describe_barrier(calls)
    return f"{place}, in {barrier}" if barrier is not None else place


def find_barrier(thread: int) -> str | None:
    """Return which function of a library a thread is in that waits for all hosts; None if it is in none."""
    return _describe_barrier(read_stacks().get(thread, []))


def _describe_barrier(calls: Sequence[Call]) -> str | None:
    for call in calls:
        for part, (library, functions) in _BARRIERS.items():
            if part in call.path and call.function in functions:
                return f"{library}'s `{call.function}`, which returns when all hosts have called it"
    return None


def _describe(call: Call) -> str:
    return f"`{call.function}`, line {call.line} of {os.path.basename(call.path)}"


def format_stacks() -> str:
    """Return the stacks of all threads of this process but the calling one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts: list[str] = []
    for ident, calls in sorted(read_stacks().items(), key=lambda found: found[0] != main):
        lines = traceback.StackSummary.from_list(
            [(call.path, call.line, call.function, None) for call in reversed(calls)]
        )
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(lines.format())}")
    return "\n".join(parts)[:MAX_STACKS_BYTES]


def is_debugged() -> bool:
    """Return whether a debugger holds this process: one that traces it, or one in a thread of its own."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("TracerPid:") and int(line.split()[1]):
                return True
    return any(part in call.path for calls in read_stacks().values() for call in calls for part in _DEBUGGERS)
