"""Tracebacks as text: where one begins in a worker's output, and what of one helps the user whose script failed.

A traceback is a chain of sections: a heading, frames, the exception, and a line that connects it with the next section.
Rules of what is left out:
- A frame of this package, unless the exception was raised there and is none of our errors: then it may be our bug.
- A cause that is in this package from its first frame to its last, if an error of ours was raised from it.
- What JAX appends to a message about frames that JAX has left out.
The log file of the host has everything.
"""

import re
from collections.abc import Sequence
from pathlib import Path

HEADING = "Traceback (most recent call last):"
JAX_NOTE = re.compile(r"\n(?:  \| )?-{20}\n(?:  \| )?For simplicity, JAX has removed its internal frames .*")
"""What JAX appends to the message of an exception that leaves one of its functions."""
_CONNECTIONS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'  File "(?P<file>.+)", line \d+')
_START = re.compile(
    rf'{re.escape(HEADING)}$|  \+ Exception Group {re.escape(HEADING)}$|  File ".+", line \d+$'
)
"""The last is that of a syntax error in the script, which has no heading."""
_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = _PACKAGE / "cli" / "demo"
"""Scripts in this package that are a user's as far as the package is concerned."""
_OUR_ERROR = re.compile(r"resilient_jax\.(?!errors\.InternalError\b)[\w.]+(?::|$)")


def is_start(line: str) -> bool:
    """Return whether a traceback, or a part of one, begins with this line."""
    return _START.match(line) is not None


def find_last_chain(lines: Sequence[str]) -> int | None:
    """Return the index where the last traceback begins, with all its causes; None if there is no traceback."""
    starts = [index for index, line in enumerate(lines) if is_start(line)]
    while len(starts) > 1:
        between = lines[starts[-2] : starts[-1]]
        is_inner = lines[starts[-1]].startswith("  File ") and lines[starts[-2]].endswith(HEADING)
        if not is_inner and not any(line in _CONNECTIONS for line in between):
            break
        starts.pop()
    return starts[-1] if starts else None


def shorten_traceback(text: str) -> str:
    """Return a traceback without what does not help its user; any other text as it is."""
    lines = JAX_NOTE.sub("", text).split("\n")
    headings = [index for index, line in enumerate(lines) if line == HEADING]
    if not headings or headings[0] != 0:  # of a group, too: its exceptions have margins
        return "\n".join(lines)
    ends = [*headings[1:], len(lines)]
    sections = [_Section(lines[start:end]) for start, end in zip(headings, ends, strict=True)]
    is_explained = sections[-1].is_our_error
    kept = [
        section.shorten()
        for section in sections
        if section is sections[-1] or not is_explained or not section.is_internal
    ]
    return "\n".join(line for section in kept for line in section)


class _Section:
    """One exception of a chain, with its frames."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        end = next((i for i, line in enumerate(lines[1:], 1) if not line.startswith("  ")), len(lines))
        self._rest = lines[end:]
        starts = [index for index in range(1, end) if _FRAME.match(lines[index])]
        self._frames = [lines[i:j] for i, j in zip(starts, [*starts[1:], end], strict=True)]
        self._are_ours = [_is_ours(frame[0]) for frame in self._frames]
        self.is_internal = all(self._are_ours)
        self.is_our_error = bool(self._rest) and _OUR_ERROR.match(self._rest[0]) is not None

    def shorten(self) -> Sequence[str]:
        """Return the lines without frames of this package, if they do not help."""
        if self.is_internal or (self._are_ours[-1] and not self.is_our_error):
            return self._lines
        pairs = zip(self._frames, self._are_ours, strict=True)
        return [HEADING, *(line for frame, is_ours in pairs if not is_ours for line in frame), *self._rest]


def _is_ours(frame: str) -> bool:
    found = _FRAME.match(frame)
    assert found is not None, "a frame begins so"
    file = Path(found["file"])
    return file.is_relative_to(_PACKAGE) and not file.is_relative_to(_EXAMPLES)
