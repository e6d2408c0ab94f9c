"""Where a command's result goes: a terminal, a file or a pipe."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console

from resilient_jax.errors import OperatorError

FILE_WIDTH = 160
"""Columns of what is printed where no terminal says how wide it is."""


@contextlib.contextmanager
def open_console() -> Iterator[Console]:
    """A console for a command's result, all of which is out at the end of the `with`; a file has wide tables.

    Raises:
        OperatorError: standard output is closed, or does not take it.
    """
    if sys.stdout is None:
        raise _unprintable("it is closed")
    try:
        yield Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough; the command line ends quietly
        raise
    except OSError as error:
        # What could not be written is still in the buffer, and would fail once more at the end of the process.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise _unprintable(error.strerror or str(error)) from error


def _unprintable(why: str) -> OperatorError:
    return OperatorError(
        f"standard output: cannot be written: {why}; expected a terminal, a file or a pipe that takes the result. Free "
        "space, or send it elsewhere"
    )
