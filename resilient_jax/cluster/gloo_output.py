"""What gloo prints to standard output when hosts connect, taken out of the lines of the script.

Gloo writes `[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3` and a newline
in pieces, and threads that connect at the same time mix theirs: after a death, when several groups of hosts connect
again, a line may have the pieces of two messages, and another only a number, or nothing. There are as many newlines as
messages.
"""

import re

_BEGINNING = b"[Gloo] Rank "
_PIECE = re.compile(
    rb"\[Gloo\] Rank \d*"
    rb"|(?:^\d+)?(?: is connected to | peer ranks\. ?|Expected number of connected peer ranks is : )\d*"
)
"""Words of a message with the number that follows. A number before them is gloo's only at the beginning of a line."""


class GlooFilter:
    """Knows how many newlines of gloo's messages are still to come."""

    def __init__(self) -> None:
        self._num_missing = 0

    def strip(self, line: bytes) -> bytes | None:
        """Return the line without pieces of gloo's messages; None if nothing is left to be shown."""
        rest = _PIECE.sub(b"", line)
        if rest != line:
            self._num_missing = max(self._num_missing + line.count(_BEGINNING) - 1, 0)
        elif self._num_missing and (not line or line.isdigit()):
            self._num_missing -= 1
            return None
        else:
            return line
        return rest if rest.strip() else None
