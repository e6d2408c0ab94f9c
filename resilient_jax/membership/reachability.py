"""Which hosts leave because members cannot reach each other. Pure.

Agents look whom they reach when their members do not go on, and report it in their statuses: that these are in the
store shows that both ends of a pair live. The smallest set of hosts that explains all pairs is taken out, and the pairs
are named. Two hosts that do not reach each other alone say nothing about which of them is at fault; either will do.

What both ends report counts at once, what one end reports only once the store would have forgotten the other if it were
dead. Until all that is reported counts nothing is decided: a host that has reported one of its pairs has reported all,
so that the smallest set is that of all pairs which hang together. No set is taken out without which too few hosts, or
nothing of the state, would be left: then all stop, keep what they have and wait for the network, as long as for hosts
that are missing (`start_timeout_s`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from resilient_jax.errors import ExitCode
from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import (
    MembershipState,
    find_recoverable_step,
    find_worker,
    is_draining,
    join_names,
)
from resilient_jax.membership.redundancy import measure_redundancy
from resilient_jax.membership.severities import Action, Evidence, choose_action
from resilient_jax.membership.vertex_cover import Pair, list_covers
from resilient_jax.protocol.generation import Generation, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.reachability import ReachReport

MAX_NAMED: Final = 3
"""Pairs of which a reason names the hosts."""
MAX_WEIGHED: Final = 32
"""Sets of hosts for which it is looked up what of the state is left without them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """Members that cannot reach each other, and what follows.

    Attributes:
        out: the hosts to take out, by name; none: taking a host out costs too much.
        reason: which members cannot reach each other, and what follows, for people.
    """

    out: tuple[HostName, ...]
    reason: str


def find_reach_report(generation: Generation, status: HostStatus) -> ReachReport | None:
    """Return what a member of this generation reports, if there are hosts that it does not reach."""
    report = status.reach
    if report is None or report.generation != generation.number or not report.unreached:
        return None
    return report if generation.membership.find_member(status.host) is not None else None


def find_separation(state: MembershipState, config: MembershipConfig) -> Separation | None:
    """Return which members cannot reach each other, and who leaves; None: all do, or a death may explain it."""
    members = state.generation.membership.members
    reports = {
        member.host: report
        for member in members
        if member.host in state.hosts
        and (report := find_reach_report(state.generation, state.hosts[member.host])) is not None
    }
    if not reports or any(find_worker(state, member) is None for member in members):
        return None
    hosts = {member.host for member in members}
    unreached = {host: hosts.intersection(report.unreached) - {host} for host, report in reports.items()}
    pairs = frozenset(frozenset((host, other)) for host, others in unreached.items() for other in others)
    mutual = {pair for pair in pairs if all(pair - {host} <= unreached.get(host, set()) for host in pair)}
    one_sided = {
        (host, other)
        for host, others in unreached.items()
        for other in others
        if frozenset((host, other)) not in mutual
    }
    if not pairs or any(other not in reports[host].lasting for host, other in one_sided):
        return None
    named = _describe_pairs(sorted(map(sorted, mutual)), sorted(one_sided))
    out, why_none = _choose_hosts(state, pairs, unreached, config)
    if choose_action(Evidence.HOSTS_SEPARATED, 0, {}) is Action.TAKE_HOST_OUT and out:
        verb = "is" if len(out) == 1 else "are"
        return Separation(
            out=out, reason=f"{named}, although all reach the store; {join_names(out)} {verb} taken out"
        )
    return Separation(out=(), reason=f"{named}, and no host is taken out: {why_none}")


def _choose_hosts(
    state: MembershipState,
    pairs: frozenset[Pair],
    unreached: Mapping[HostName, set[HostName]],
    config: MembershipConfig,
) -> tuple[tuple[HostName, ...], str]:
    """Return the smallest set of hosts that explains all pairs and can be spared, or none and why there is none.

    Of several: the one that most reports are about; whose hosts leave the newest state to others; that does not run the
    coordination service, and so does not lead; the last by name.
    """
    hosts = sorted(frozenset().union(*pairs))
    num_reports = {host: sum(host in others for others in unreached.values()) for host in hosts}
    newest = measure_redundancy(state)
    why_not: dict[str, None] = {}

    def rank(out: tuple[HostName, ...]) -> tuple[int, bool, int, tuple[HostName, ...]] | None:
        """Return how well these hosts can be spared, a greater value for better; None: they cannot."""
        left = measure_redundancy(_leave_out(state, out))
        if (problem := _find_problem(state, out, config, is_state_left=left is not None)) is not None:
            why_not[problem] = None
            return None
        keeps_newest = newest is None or left is None or left.step >= newest.step
        num_services = sum(bool(state.hosts[host].services) for host in out)
        return sum(num_reports[host] for host in out), keeps_newest, -num_services, out

    for size in range(1, len(hosts)):
        covers = sorted(
            (tuple(sorted(cover)) for cover in list_covers(pairs, size)),
            key=lambda cover: (sum(num_reports[host] for host in cover), cover),
            reverse=True,
        )
        ranks = [found for cover in covers[:MAX_WEIGHED] if (found := rank(cover)) is not None]
        if ranks:
            return max(ranks)[-1], ""
    return (), "; ".join(list(why_not)[:MAX_NAMED])


def _find_problem(
    state: MembershipState, out: tuple[HostName, ...], config: MembershipConfig, *, is_state_left: bool
) -> str | None:
    """Return why these hosts cannot be spared; None if they can."""
    num_left = sum(
        host not in out
        and not is_draining(state, host)
        and status.worker is not None
        and status.worker.is_alive
        for host, status in state.hosts.items()
    )
    if num_left < max(config.min_hosts, 1):
        return (
            f"without {join_names(out)} the job has {num_left} of the {config.min_hosts} hosts that it needs "
            "(min_hosts)"
        )
    if find_recoverable_step(state) > 0 and not is_state_left:
        return f"nothing of the state is complete without {join_names(out)}"
    return None


def _leave_out(state: MembershipState, out: tuple[HostName, ...]) -> MembershipState:
    """Return the job without these hosts: neither what their workers have counts, nor their snapshots."""
    hosts = {host: status for host, status in state.hosts.items() if host not in out}
    return MembershipState(generation=state.generation, hosts=hosts, phase_since_s=state.phase_since_s)


def _describe_pairs(mutual: Sequence[Sequence[HostName]], one_sided: Sequence[Sequence[HostName]]) -> str:
    """Return a text such as "host-0 and host-1 cannot reach each other, host-2 cannot reach host-3"."""
    said = [f"{one} and {other}" for one, other in mutual[:MAX_NAMED]]
    said += [f"{len(mutual) - MAX_NAMED} more pairs"] if len(mutual) > MAX_NAMED else []
    named = [f"{', '.join(said)} cannot reach each other"] if said else []
    named += [f"{one} cannot reach {other}" for one, other in one_sided[:MAX_NAMED]]
    named += (
        [f"{len(one_sided) - MAX_NAMED} more hosts do not reach another"]
        if len(one_sided) > MAX_NAMED
        else []
    )
    return ", ".join(named)


def make_separation_outcome(separation: Separation, waited_s: float) -> JobOutcome:
    """Return the outcome of a job whose members have not reached each other for so long, and cannot be spared."""
    message = (
        f"{separation.reason}; waited {waited_s:.0f} s for the network between them. Mend it (routes, firewalls, "
        "security groups: each host must reach every port of each other) and start the job again"
    )
    return JobOutcome(
        kind=JobOutcomeKind.TOO_FEW_HOSTS, exit_code=int(ExitCode.TOO_FEW_HOSTS), message=message
    )
