"""The record of an error that a host's script has raised, which the leader keeps as long as it may raise it again."""

from typing import Final

import msgspec

from resilient_jax.ids import HostName, Incarnation

EXIT_CODE: Final = "exit code "
"""How `RaisedError.what` begins for a script that raised no exception; the code follows."""


class RaisedError(msgspec.Struct, frozen=True, kw_only=True):
    """An error that ended a worker.

    Attributes:
        host: the worker's host.
        incarnation: number of the worker's start; the host may start another.
        step: the steps that the host had committed.
        what: the type of the exception, or the exit code of a script that raised none.
        place: the innermost line of the script's own in the traceback, as FILE:LINE; empty: there is no traceback.
    """

    host: HostName
    incarnation: Incarnation
    step: int
    what: str
    place: str = ""

    def is_same_error(self, other: "RaisedError") -> bool:
        """Return whether two hosts have raised the same at the same step: then it is the program's error."""
        return (self.step, self.what, self.place) == (other.step, other.what, other.place)

    def describe(self) -> str:
        """Return the predicate of a sentence, such as "raised ValueError at train.py:40"."""
        if self.what.startswith(EXIT_CODE):
            return f"ended with {self.what}"
        return f"raised {self.what} at {self.place}" if self.place else f"raised {self.what}"
