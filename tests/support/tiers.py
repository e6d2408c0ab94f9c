"""The tiers of the suite: what each is for, and what it may take."""

import dataclasses
from pathlib import Path
from typing import Final

from tests.support.paths import TESTS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The tests of one folder.

    Attributes:
        name: of the folder under `tests/`.
        what: they are, in a few words.
        budget_s: what they may take together on two idle cores, in seconds.
        longest_s: what one test takes at most on an idle machine, with what it sets up for its module. Ten times as
            much, and it hangs.
        has_jobs: whether they run jobs, each of which has more processes than there are cores.
    """

    name: str
    what: str
    budget_s: float
    longest_s: float
    has_jobs: bool = False

    @property
    def folder(self) -> Path:
        """Where they are."""
        return TESTS / self.name


PURE: Final = Tier(name="pure", what="no JAX, no process", budget_s=120, longest_s=6)
JAX: Final = Tier(name="jax", what="JAX in one process", budget_s=240, longest_s=15)
PROCESS: Final = Tier(name="process", what="processes, sockets, kills; no job", budget_s=180, longest_s=15)
SMOKE: Final = Tier(
    name="smoke", what="four jobs, each broken in turn", budget_s=180, longest_s=60, has_jobs=True
)
JOBS: Final = Tier(
    name="jobs",
    what="real jobs: places x victims x signals x kinds",
    budget_s=1500,
    longest_s=60,
    has_jobs=True,
)
BENCHMARKS: Final = Tier(name="benchmarks/tests", what="tests of the benchmarks", budget_s=300, longest_s=60)

TIERS: Final = (PURE, JAX, PROCESS, SMOKE, JOBS, BENCHMARKS)
FULL_ONLY: Final = frozenset({BENCHMARKS.name})
"""Run by `make test-all` alone."""


def find_tier(path: Path) -> Tier | None:
    """Return the tier of a file; None: it is in none."""
    return next((tier for tier in TIERS if path.is_relative_to(tier.folder)), None)
