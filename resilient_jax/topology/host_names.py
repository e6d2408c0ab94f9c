"""Patterns of host names: "host-{000..127}" is host-000, host-001, ..., host-127."""

import itertools
import math
import re
from collections.abc import Iterator

from resilient_jax.topology.errors import TopologyError

MAX_HOSTS = 1_000_000
"""Most hosts of one pattern; more is a mistyped number, and would exhaust memory before any check."""

_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")


def expand_pattern(pattern: str) -> Iterator[str]:
    """Return the names of a pattern, the last range running fastest.

    Each `{first..last}` counts from first to last, with leading zeros if the first has some or both are
    equally long. A pattern without ranges is one name.

    Raises:
        TopologyError: a range runs backwards, a brace belongs to none, or there are too many names.

    Example:
        >>> list(expand_pattern("rack{1..2}-host{08..09}"))
        ['rack1-host08', 'rack1-host09', 'rack2-host08', 'rack2-host09']
    """
    first, *rest = _RANGE.split(pattern)
    # `split` returns the text before the first range, then (first, last, text behind) of each range.
    texts = [first, *rest[2::3]]
    ranges = [_count(start, end, pattern) for start, end in zip(rest[::3], rest[1::3], strict=True)]
    if any("{" in text or "}" in text for text in texts):
        raise TopologyError(
            f"found {pattern!r} with a brace that belongs to no range, expected ranges like {{00..31}}. "
            "Correct the pattern, or list the names"
        )
    if (count := math.prod(map(len, ranges))) > MAX_HOSTS:
        raise TopologyError(
            f"found {pattern!r}, which is {count} hosts, expected at most {MAX_HOSTS}. Correct its ranges"
        )
    # The width of a range with leading zeros, else 0.
    widths = [
        len(start) if start.startswith("0") or len(start) == len(end) else 0
        for start, end in zip(rest[::3], rest[1::3], strict=True)
    ]
    return (_fill(texts, numbers, widths) for numbers in itertools.product(*ranges))


def _count(start: str, end: str, pattern: str) -> range:
    if int(end) < int(start):
        raise TopologyError(
            f"found {pattern!r} with a range that runs backwards, expected the smaller number first. "
            f"Write {{{end}..{start}}}"
        )
    return range(int(start), int(end) + 1)


def _fill(texts: list[str], numbers: tuple[int, ...], widths: list[int]) -> str:
    digits = (f"{number:0{width}d}" for number, width in zip(numbers, widths, strict=True))
    return texts[0] + "".join(digit + text for digit, text in zip(digits, texts[1:], strict=True))
