"""The losses that a cluster may meet, one of each kind, and what would be done after each."""

import collections
import dataclasses
from collections.abc import Iterator

from resilient_jax.planning.errors import NoFeasiblePlan
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replanning import ReplanDecision, replan
from resilient_jax.topology import Host, Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PossibleLoss:
    """One loss, for all that are like it.

    Attributes:
        kind: such as "a device", or "a rack".
        names: what is lost, as `Topology.without` takes it.
        num_alike: how many losses of this kind there are.
    """

    kind: str
    names: tuple[str, ...]
    num_alike: int

    def describe(self) -> str:
        """Return a text such as "a rack: host-0 to host-3, 4 hosts"."""
        first, last = self.names[0], self.names[-1]
        lost = (
            f"{first} to {last}, {len(self.names)} hosts" if len(self.names) > 2 else " and ".join(self.names)
        )
        return f"{self.kind}: {lost}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossDecision:
    """What would be done after a loss.

    Attributes:
        loss: the loss.
        decision: the options and the choice; None: no plan fits.
        why_not: why no plan fits; empty: one does.
    """

    loss: PossibleLoss
    decision: ReplanDecision | None
    why_not: str = ""


def list_possible_losses(topology: Topology) -> list[PossibleLoss]:
    """Return a loss of each kind: a device, a host, two hosts, and a failure domain of each level and size.

    Hosts of one accelerator, with as many devices of the same speeds, are alike; the last of them stands for all. Two
    hosts are of different failure domains where there are several. A loss that leaves no host is none of them.
    """
    losses = [loss for loss in _list_losses(topology) if _is_survivable(topology, loss)]
    return list({loss.names: loss for loss in reversed(losses)}.values())[::-1]


def decide_losses(
    plan: Plan, topology: Topology, *, next_failure_s: float | None = None, min_replicas: int = 1
) -> list[LossDecision]:
    """Return what `replan` would choose after each possible loss.

    Args:
        plan: the plan that runs.
        topology: on which it runs.
        next_failure_s: as of `replan`.
        min_replicas: as of `replan`.
    """
    return [
        _decide(plan, topology, loss, next_failure_s, min_replicas) for loss in list_possible_losses(topology)
    ]


def _decide(
    plan: Plan, topology: Topology, loss: PossibleLoss, next_failure_s: float | None, min_replicas: int
) -> LossDecision:
    try:
        decision = replan(
            plan,
            topology.without(*loss.names),
            next_failure_s=next_failure_s,
            min_replicas=min_replicas,
        )
    except NoFeasiblePlan as error:
        return LossDecision(loss=loss, decision=None, why_not=str(error))
    return LossDecision(loss=loss, decision=decision)


def _list_losses(topology: Topology) -> Iterator[PossibleLoss]:
    alike: dict[object, list[Host]] = collections.defaultdict(list)
    for host in topology.hosts:
        alike[host.accelerator, host.devices, host.device_speeds, host.speed].append(host)
    for hosts in alike.values():
        last = hosts[-1]
        if last.devices > 1:
            indexes = range(last.devices + len(last.lost_devices))
            index = max(set(indexes) - set(last.lost_devices))
            names = (f"{last.name}/{index}",)
            yield PossibleLoss(kind="a device", names=names, num_alike=len(hosts) * last.devices)
    for hosts in alike.values():
        yield PossibleLoss(kind="a host", names=(hosts[-1].name,), num_alike=len(hosts))
    if (pair := _find_pair(topology)) is not None:
        num_hosts = len(topology.hosts)
        yield PossibleLoss(kind="two hosts", names=pair, num_alike=num_hosts * (num_hosts - 1) // 2)
    for level in topology.failure_levels[1:]:
        sizes: dict[int, list[tuple[str, ...]]] = collections.defaultdict(list)
        for domain in topology.domains(level):
            sizes[len(domain.hosts)].append(tuple(domain.hosts))
        for domains in sizes.values():
            yield PossibleLoss(kind=f"a {level}", names=domains[-1], num_alike=len(domains))


def _find_pair(topology: Topology) -> tuple[str, str] | None:
    if len(topology.hosts) < 3:
        return None
    *others, last = topology.hosts
    apart = [host for host in others if host.domains[-1:] != last.domains[-1:]]
    return (apart or others)[-1].name, last.name


def _is_survivable(topology: Topology, loss: PossibleLoss) -> bool:
    hosts = {name.partition("/")[0] for name in loss.names}
    return any("/" in name for name in loss.names) or len(hosts) < len(topology.hosts)
