"""How many examples the properties of the suite have.

In `make test` and `make test-jobs` each has ten, and the same ones in every run. `make test-all` draws hundreds of new
ones, says with which seed, and keeps the seed of what failed.
"""

from collections.abc import Callable
from typing import Final

from hypothesis import HealthCheck, settings

FEW: Final = 10
MANY: Final = 300
QUICK, FULL = "quick", "full"


def register_profiles() -> None:
    """Make the two profiles known to hypothesis."""
    # Its deadlines and health checks measure time, which says nothing on a busy machine.
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    settings.register_profile(
        QUICK,
        deadline=None,
        derandomize=True,
        max_examples=FEW,
        print_blob=False,
        database=None,
        suppress_health_check=checks,
    )
    # Each value is said: what a profile leaves out, hypothesis takes from its own, which differs where CI is set.
    settings.register_profile(
        FULL,
        deadline=None,
        derandomize=False,
        max_examples=MANY,
        print_blob=True,
        database=None,
        suppress_health_check=checks,
    )


def examples(few: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a property fewer examples than most have in `make test`, because each is much work."""
    is_full = settings.get_current_profile_name() == FULL
    return settings(max_examples=MANY if is_full else few)
