"""What the leader of a job would do about a host or device that becomes slow, by the policy that it asks."""

import dataclasses

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.ids import HostName
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.possible_slowness import (
    PossibleSlowness,
    estimate_possible_slowdown,
    list_possible_slowness,
)
from resilient_jax.policy.choice import Choice, choose
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss, select_devices
from resilient_jax.policy.prices import price_job
from resilient_jax.policy.situations import SlowTraining
from resilient_jax.protocol.recovery_records import JobHistory, RecoveryAction
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowDecision:
    """What would be done about a slow host or device.

    Attributes:
        slow: host or device that is slow.
        slowdown: cost of that, and the speed after each action, by the cost model.
        choice: what the policy chose, with all options.
    """

    slow: PossibleSlowness
    slowdown: Slowdown
    choice: Choice

    @property
    def speeds(self) -> dict[RecoveryAction, float]:
        """The speed after each action, as a fraction of that with nothing slow; 0: it is not possible."""
        down = self.slowdown
        return {
            RecoveryAction.KEEP: down.kept,
            RecoveryAction.REPLACE: down.replaced,
            RecoveryAction.TAKE_OUT: down.without,
            RecoveryAction.FEWER_DEVICES: down.fewer_devices,
            RecoveryAction.REDIVIDE: down.redivided,
        }


def decide_slow_hosts(
    plan: Plan,
    topology: Topology,
    after_loss: DevicesAfterLoss,
    has_spare: bool = False,
    min_replicas: int = 1,
) -> list[SlowDecision]:
    """Return what the policy would choose for each host or device that may be slow.

    Args:
        plan: the plan that runs.
        topology: cluster that the plan runs on.
        after_loss: what a host does with the devices that are left; see `JobConfig`.
        has_spare: whether a host spares.
        min_replicas: least number of replicas; see `replan`.
    """
    places = len(topology.hosts)
    prices = price_job(JobHistory(), [HostName(host.name) for host in topology.hosts])
    decisions = []
    for slow in list_possible_slowness(topology):
        # As the host's agent selects them, of all that it ever had: those that stand by take the place of slow ones.
        lost = slow.host.lost_devices
        out = lost if slow.device is None else (*lost, slow.device)
        used = select_devices(slow.host.devices + len(lost), out, after_loss)
        slowdown = estimate_possible_slowdown(plan, topology, slow, used, min_replicas=min_replicas)
        training = SlowTraining(
            places=places,
            training=places,
            slowdown=slowdown,
            has_spare=has_spare,
            refusal_fewer_devices="" if places > 1 else "the next loss may be that of the state",
        )
        choice = choose(training, prices)
        decisions.append(SlowDecision(slow=slow, slowdown=slowdown, choice=choice))
    return decisions


def print_slow_hosts(console: Console, decisions: list[SlowDecision]) -> None:
    """Print the speed after each action for whatever may be slow, and the reason of each choice."""
    table = Table(
        "slow", title="a host or a device slow: the speed after each action, in brackets the choice"
    )
    for action in decisions[0].speeds:
        table.add_column(str(action), justify="right")
    for decision in decisions:
        refused = {option.action for option in decision.choice.options if option.why_not}
        cells = [
            "-"
            if action in refused
            else f"[{speed:.3f}]"
            if action is decision.choice.action
            else f"{speed:.3f}"
            for action, speed in decision.speeds.items()
        ]
        what = f"{decision.slow.describe()} (1 of {decision.slow.num_alike})"
        table.add_row(escape(what), *map(escape, cells))
    console.print(table)
    for decision in decisions:
        console.print(f"{escape(decision.slow.describe())}: {escape(decision.choice.reason)}")


def describe_slow_host(decision: SlowDecision) -> dict[str, object]:
    """Return a decision in types that JSON has: the choice is the first option."""
    speeds = decision.speeds
    return {
        "slow": decision.slow.name,
        "speed": decision.slow.speed,
        "num_alike": decision.slow.num_alike,
        "reason": decision.choice.reason,
        "next_failure_s": decision.choice.next_failure_s,
        "options": [
            {
                "action": option.action,
                "speed": speeds[option.action],
                "pause_s": option.pause_s,
                "score": option.score,
                "why_not": option.why_not,
            }
            for option in decision.choice.options
        ],
    }
