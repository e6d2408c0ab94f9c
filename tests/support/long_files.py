"""The files of tests that take longest go first, so that two at a time end together.

Without `--no-loadscope-reorder`, pytest-xdist begins with the files of most tests. The few long tests of a file then
come last, and one core computes while the other has nothing left.
"""

from collections.abc import Sequence

import pytest


def put_first(items: list[pytest.Item], names: Sequence[str]) -> None:
    """Sort tests by the rank of their file `test_<name>.py` in `names`; those of all other files follow as they are."""
    ranks = {f"test_{name}": rank for rank, name in enumerate(names)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
