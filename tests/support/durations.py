"""What each file of tests took last: over several processes the longest begin first, so that all cores end together."""

import json
from collections.abc import Mapping
from typing import Final

import pytest

from tests.support.paths import ROOT, TESTS

FILE: Final = TESTS / "durations.json"
"""Seconds by file, without those that take less than `MIN_S`; `python tests/run.py --record` writes it."""
MIN_S: Final = 1.0


def read_durations() -> dict[str, float]:
    """Return the seconds of each file, by its path from the top."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write_durations(seconds: Mapping[str, float]) -> None:
    """Keep what some files took; the others stay as they are, but for those that are gone."""
    known = {path: s for path, s in {**read_durations(), **seconds}.items() if (ROOT / path).exists()}
    kept = {path: round(s, 1) for path, s in sorted(known.items()) if s >= MIN_S}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")


def order_by_duration(items: list[pytest.Item], *, is_one_process: bool) -> None:
    """Sort tests by what their file takes; those of a file stay in their order.

    Args:
        items: the tests.
        is_one_process: the shortest begin, then, so that what fails is soon seen.
    """
    seconds = read_durations()
    items.sort(
        key=lambda item: seconds.get(str(item.path.relative_to(ROOT)), 0.0), reverse=not is_one_process
    )
