"""What a situation offers: each action with its price and its wait, and which action is the usual one."""

import dataclasses
from collections.abc import Mapping
from typing import Final, NamedTuple

from resilient_jax.policy.prices import Prices
from resilient_jax.policy.return_groups import PATIENCE, ReturnGroup
from resilient_jax.policy.score import Phase, score_phases
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryOption, TimedChange


class Wait(NamedTuple):
    """The wait that is a part of an option.

    Attributes:
        wait_s: the longest time for which the job waits, or keeps a stage or axes; 0: the action is carried out.
        num_awaited: number of hosts waited for: the first ones of those expected back.
    """

    wait_s: float = 0.0
    num_awaited: int = 0

    @classmethod
    def for_group(cls, group: ReturnGroup | None, at_least_s: float = 0.0) -> "Wait":
        """Return the wait until a group of hosts is back, and somewhat longer; None: for no host."""
        if group is None:
            return cls(at_least_s)
        return cls(max(PATIENCE * group.return_s, at_least_s), group.num_hosts)


NO_WAIT: Final = Wait()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a situation offers.

    Attributes:
        options: every option once, in an order that decides between equal ones.
        usual: the action from which it takes more than noise to change.
        reachable: the best speed that any option reaches, as a part of that of all hosts.
        waits: an action that is not in here is carried out at once.
    """

    options: tuple[RecoveryOption, ...]
    usual: RecoveryAction
    reachable: float
    waits: Mapping[RecoveryAction, Wait] = dataclasses.field(default_factory=dict[RecoveryAction, Wait])

    def find(self, action: RecoveryAction) -> RecoveryOption:
        """Return the option of an action."""
        return next(option for option in self.options if option.action is action)


def make_option(
    action: RecoveryAction,
    phases: tuple[Phase, ...],
    prices: Prices,
    why_not: str = "",
    *,
    risk_s: float = 0.0,
) -> RecoveryOption:
    """Return an option with its score; `risk_s` is a further loss of time, at any moment until the next failure."""
    first, *later = phases
    priced = (dataclasses.replace(first, pause_s=first.pause_s + risk_s), *later)
    return RecoveryOption(
        action=action,
        score=score_phases(priced, prices.next_failure_s),
        pause_s=first.pause_s,
        speed=first.speed,
        why_not=why_not,
    )


def find_join_s(change: Loss | Admission, prices: Prices) -> float:
    """Return the pause in which hosts join that are ready, in seconds."""
    return prices.seconds[TimedChange.GROW if change.can_join_in_place else TimedChange.REFORM_COLD]


def count_awaited(change: Loss | Admission) -> float:
    """Return how many hosts are expected back, by their devices."""
    return sum(one.share for one in change.awaited)


def explain_new_axes(change: Loss | Admission) -> str:
    """Return why the axes that the job has cannot be kept by the hosts that would train; empty if they can."""
    if change.plan is None:
        return "no planned axes are known for the hosts that would train"
    if not change.has_new_axes:
        return "the best axes are those that the job has"
    return "" if change.plan.kept else "its axes do not fit the hosts that would train"
