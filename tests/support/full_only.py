"""Cases that only `make test-all` runs, of a product of which `make test` or `make test-jobs` run a choice."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def full_but(cases: Iterable[Case], quick: Callable[[Case], bool]) -> list[object]:
    """Return the parameters of a test.

    Args:
        cases: all of them; a tuple has the values of several parameters.
        quick: whether a case is in the other commands, too.
    """
    return [case if quick(case) else _mark(case) for case in cases]


def _mark(case: object) -> object:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
