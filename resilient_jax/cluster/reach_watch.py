"""Looks which other members a host reaches when its own does not go on, and has it in the host's status.

What a worker waits for says little about whom it waits for: to join a world all wait for all, a broken sum fails first
where a time-out happens to be shortest. So the agent connects to the port of each other member's worker. That nobody
answers there, in two tries, is all that is found; the leader decides who leaves (`membership.reachability`).
The kernel accepts a connection also for a worker that is stopped, or busy.

A host that dies is not reached either. It is called lasting only after a time in which the store would have forgotten
it. In a large job a look takes in some members at a time, the nearest by seat first, so that two hosts look at each
other in the same one.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.generation_follower import GenerationFollower
from resilient_jax.cluster.port_probe import PortAnswer, ProbeLimits, probe_port
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.reachability import ReachReport
from resilient_jax.protocol.worker_report import WorkerReport

PATIENCE_S: Final = 2.0
"""So long a world may take to form, or a first step to finish, before anybody is looked at."""
LOOK_INTERVAL_S: Final = 0.5
REPEAT_INTERVAL_S: Final = 1.0
"""Between two looks at the same members."""
MAX_MEMBERS: Final = 64
"""Looked at at a time: the same number of connections on each host."""
LIMITS: Final = ProbeLimits(num_tries=2, timeout_s=1.5, interval_s=0.5)
LASTING_LEASES: Final = 2.0
"""So many times the length of a lease after it was first not reached, a host that is dead is in the store no more."""


def must_look(generation: Generation, host: HostName, report: WorkerReport, waited_s: float) -> bool:
    """Return whether a host's worker is a member that does not go on, so that others may be out of reach.

    Args:
        generation: newest generation that the host has read.
        waited_s: time since the host has read this generation's phase.
    """
    if generation.membership.find_member(host) is None or len(generation.membership.members) < 2:
        return False
    has_failed = generation.failures.attempts > 0
    match generation.phase:
        case GenerationPhase.QUIESCE:
            return has_failed
        case GenerationPhase.FORM:
            has_formed = report.generation == generation.number and report.place.has_formed
            return not has_formed and (has_failed or waited_s > PATIENCE_S)
        case GenerationPhase.ACTIVE | GenerationPhase.PAUSE | GenerationPhase.BOUNDARY:
            is_late = not (report.place.has_finished_step or report.is_done) and waited_s > PATIENCE_S
            return is_late or report.overdue is not None
        case GenerationPhase.FINISHED:
            return False


def choose_members(generation: Generation, host: HostName, number: int) -> tuple[Member, ...]:
    """Return the other members that are looked at in the look of this number, from 0: all where they are few."""
    places = [member.host for member in generation.membership.members]
    here, count = places.index(host), len(places)
    near_first = sorted(
        (place for place in range(count) if place != here),
        key=lambda place: (min((place - here) % count, (here - place) % count), place),
    )
    num_looks = max(1, -(-len(near_first) // MAX_MEMBERS))
    first = number % num_looks * MAX_MEMBERS
    return tuple(generation.membership.members[place] for place in near_first[first : first + MAX_MEMBERS])


class ReachWatch:
    """Whom this host reaches.

    Attributes:
        report: for the host's status; None: the members go on.
    """

    def __init__(
        self,
        context: AgentContext,
        follower: GenerationFollower,
        supervisor: WorkerSupervisor,
        on_change: Callable[[], None],
    ) -> None:
        """Call `on_change` after every change of `report`."""
        self._context = context
        self._host = context.settings.host
        self._follower = follower
        self._supervisor = supervisor
        self._on_change = on_change
        self._woken = asyncio.Event()
        self._phase: tuple[GenerationNumber, GenerationPhase] | None = None
        self._phase_since_s = 0.0
        self._num_looks = 0
        """At members of the present generation."""
        self._unreached: dict[HostName, float] = {}
        """When each was first found not to be reached, without having been reached since."""
        self.report: ReachReport | None = None

    def wake(self) -> None:
        """Look at once whether others are to be looked at: the generation has changed."""
        self._woken.set()

    async def run(self) -> None:
        """Look, for as long as this host is a member that does not go on; else wait until it is."""
        while True:
            self._woken.clear()
            generation, worker = self._follower.generation, self._supervisor.status
            interval_s = LOOK_INTERVAL_S
            if generation is not None and worker is not None and self._must_look(generation, worker):
                await self._look(generation)
                interval_s = REPEAT_INTERVAL_S
            else:
                self._forget()
            try:
                async with asyncio.timeout(interval_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def _must_look(self, generation: Generation, worker: WorkerStatus) -> bool:
        now_s, phase = self._context.clock.monotonic_s(), (generation.number, generation.phase)
        if phase != self._phase:
            if self._phase is None or self._phase[0] != generation.number:
                self._num_looks = 0
            self._phase, self._phase_since_s = phase, now_s
        return must_look(generation, self._host, worker.report, now_s - self._phase_since_s)

    def _forget(self) -> None:
        """Take back what was reported: the members go on, or others are members."""
        before, self.report = self.report, None
        self._unreached.clear()
        if before is not None and before.unreached:
            self._on_change()

    async def _look(self, generation: Generation) -> None:
        looked_at = choose_members(generation, self._host, self._num_looks)
        answers = await asyncio.gather(*(reaches(member.endpoint) for member in looked_at))
        # A look takes seconds where a host is not reached: what it has found of members that stay is no older then.
        known = self._follower.generation
        workers = {(member.host, member.incarnation) for member in generation.membership.members}
        if known is None or not {(m.host, m.incarnation) for m in known.membership.members} <= workers:
            return  # it is not known whom of the new ones this host reaches
        self._num_looks += 1
        self._note([m.host for m, answer in zip(looked_at, answers, strict=True) if not answer], looked_at)
        now_s = self._context.clock.monotonic_s()
        lasts_s = LASTING_LEASES * self._context.settings.config.lease_ttl_s
        since_s = {
            m.host: self._unreached[m.host] for m in known.membership.members if m.host in self._unreached
        }
        report = ReachReport(
            generation=known.number,
            unreached=tuple(sorted(since_s)),
            lasting=tuple(sorted(host for host, since in since_s.items() if now_s - since > lasts_s)),
        )
        if report != self.report:
            self.report = report
            self._on_change()

    def _note(self, unreached: Sequence[HostName], looked_at: Sequence[Member]) -> None:
        now_s = self._context.clock.monotonic_s()
        new = [host for host in unreached if host not in self._unreached]
        for member in looked_at:
            if member.host not in unreached:
                self._unreached.pop(member.host, None)
        self._unreached |= dict.fromkeys(new, now_s)
        if new:
            self._context.log.record(EventKind.HOSTS_UNREACHED, hosts=", ".join(new))


async def reaches(endpoint: str) -> bool:
    """Return whether a connection to this address is accepted; also if there is none."""
    if not endpoint:
        return True
    doubted = (PortAnswer.REFUSED, PortAnswer.NONE)
    return await probe_port(endpoint, LIMITS, doubted) is PortAnswer.ACCEPTED
