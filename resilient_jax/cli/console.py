"""The output of a command's result: to a terminal, a file or a pipe."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console

from resilient_jax.errors import OperatorError

FILE_WIDTH = 160
"""Columns of output that does not go to a terminal, which would have a width of its own."""


@contextlib.contextmanager
def open_console() -> Iterator[Console]:
    """Yield a console for a command's result, which is flushed at the end of the `with` block; files get wide tables.

    Raises:
        OperatorError: standard output is closed, or cannot be written.
    """
    if sys.stdout is None:
        raise _unprintable("it is closed")
    try:
        yield Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe early (`head`): the command line ends quietly
        raise
    except OSError as error:
        # The unwritten output is still in the buffer, and its flush at the end of the process would fail again.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise _unprintable(error.strerror or str(error)) from error


def _unprintable(why: str) -> OperatorError:
    return OperatorError(
        f"standard output: found that it cannot be written ({why}), expected a terminal, a file or a pipe that takes "
        "the result. Free space, or send it elsewhere"
    )
