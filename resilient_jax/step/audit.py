"""Which microbatches are computed by two hosts, and what follows if the two results differ. Pure.

Rules:
1. What is audited is a function of the accumulation, its step and the members: every host knows it without a message.
2. In a step with audits every replica audits another host's microbatch, after its own, and has one audited. All hosts
   audit at once, so that a step takes longer by one microbatch of a replica and not of the job: the price is the share
   of microbatches that is audited.
3. Hosts audit in a ring whose offset is drawn in each step, so that each comes to audit each other.
4. If two results differ, both hosts compute the microbatch again, and a third host does, too. A host is wrong if the
   other one had the same bits twice, and the third host has them.
5. Otherwise no host is named: computations that differ from run to run are not reproducible.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from resilient_jax.step.assignment import AccumulationSpec, Assignment, MeshAxes, ReplicaLocation

Digest = tuple[int, ...]
"""What identifies the result of a microbatch, to the last bit."""
MIN_HOSTS_TO_SETTLE: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A microbatch that two replicas compute.

    Attributes:
        microbatch: position of the microbatch in the step.
        owner: number of the replica whose total has it.
        auditor: number of a replica on another host, which computes it for comparison.
        referee: number of a replica on a third host, which computes it if the two differ; None: there are two hosts.
    """

    microbatch: int
    owner: int
    auditor: int
    referee: int | None


class Party(enum.StrEnum):
    """A side of an audit."""

    OWNER = "owner"
    AUDITOR = "auditor"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvidence:
    """The digests of a microbatch that two replicas computed differently, and then again.

    Attributes:
        referee: what the third host has computed; None: there is no third host.
    """

    owner: Digest
    auditor: Digest
    owner_again: Digest
    auditor_again: Digest
    referee: Digest | None

    @property
    def is_owner_steady(self) -> bool:
        """Whether the owner has computed the same bits twice."""
        return self.owner == self.owner_again

    @property
    def is_auditor_steady(self) -> bool:
        """Whether the auditor has computed the same bits twice."""
        return self.auditor == self.auditor_again


def draw_audits(spec: AccumulationSpec, assignment: Assignment, share: float) -> tuple[Audit, ...]:
    """Return the audits of an accumulation.

    Args:
        assignment: which replica computes which microbatches now: those that no host had before.
        share: part of all microbatches that is audited, from 0 to 1.

    Returns:
        At most one for each microbatch. None of a host whose replicas have other numbers of devices, or other axes,
        than those of all other hosts. None with one host, or with replicas that span hosts: of those that compute a
        microbatch together none could be named.
    """
    locations, by_replica = assignment.locations, assignment.by_replica
    if any(len(location.host_indexes) > 1 for location in locations):
        return ()
    # The number per replica has the mean share x microbatches / replicas: its integer part, and one more as often as
    # the rest says.
    mean = share * sum(map(len, by_replica)) / len(locations)
    count = int(mean) + (_draw(spec, "step") % 2**32 < (mean % 1.0) * 2**32)
    audits = []
    for comparable in _group_comparable(locations):
        for owner, auditors, referee in _pair_replicas(spec, comparable):
            ranked = sorted(by_replica[owner], key=lambda index: _draw(spec, f"microbatch {index}"))
            for turn, auditor in enumerate(auditors):
                mine = ranked[turn :: len(auditors)]
                audits += [
                    Audit(microbatch=index, owner=owner, auditor=auditor, referee=referee)
                    for index in sorted(mine if share >= 1 else mine[:count])
                ]
    return tuple(audits)


Slots = dict[int, tuple[int, ...]]
"""The numbers of each host's replicas, by the index of the host."""


def _group_comparable(locations: Sequence[ReplicaLocation]) -> list[Slots]:
    """Return the hosts by devices and axes of their replicas: with others a microbatch has other bits."""
    groups: dict[tuple[int, MeshAxes], dict[int, list[int]]] = {}
    for number, location in enumerate(locations):
        replicas = groups.setdefault((location.devices, location.axes), {})
        replicas.setdefault(location.host_indexes[0], []).append(number)
    return [{host: tuple(group[host]) for host in sorted(group)} for _, group in sorted(groups.items())]


def _pair_replicas(spec: AccumulationSpec, slots: Slots) -> Iterator[tuple[int, tuple[int, ...], int | None]]:
    """Yield each replica with those that audit it, and a referee; each replica audits at least one.

    Hosts with equally many replicas audit one to one. Where an owner's host has fewer than its auditor's, some of its
    replicas are audited by several.
    """
    hosts = list(slots)
    if len(hosts) < 2:
        return
    first = 1 + _draw(spec, "auditor") % (len(hosts) - 1)
    second = _choose_other(_draw(spec, "referee"), first, len(hosts))
    for place, host in enumerate(hosts):
        own, others = slots[host], slots[hosts[(place + first) % len(hosts)]]
        thirds = None if second is None else slots[hosts[(place + second) % len(hosts)]]
        for slot, owner in enumerate(own):
            auditors = others[slot :: len(own)] or (others[slot % len(others)],)
            yield owner, auditors, None if thirds is None else thirds[slot % len(thirds)]


def _draw(spec: AccumulationSpec, what: str) -> int:
    """Return a number of 64 bits, the same on every host."""
    text = f"audit {spec.name} {spec.step} {what}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _choose_other(drawn: int, first: int, num_hosts: int) -> int | None:
    """Return an offset in the ring that is neither 0 nor `first`; None: there is none."""
    others = [offset for offset in range(1, num_hosts) if offset != first]
    return others[drawn % len(others)] if others else None


def list_audited_hosts(audits: Sequence[Audit], assignment: Assignment) -> list[int]:
    """Return the hosts of which each replica has a microbatch audited and audits one, last of all in the step.

    If these agree, what such a host computed before is what a sound processor computes, unless it errs by chance.
    """
    audited = {audit.owner for audit in audits} & {audit.auditor for audit in audits}
    replicas: dict[int, set[int]] = {}
    for number, location in enumerate(assignment.locations):
        replicas.setdefault(location.host_indexes[0], set()).add(number)
    return sorted(host for host, own in replicas.items() if own <= audited)


def settle(evidence: AuditEvidence) -> tuple[Party | None, str]:
    """Return which side of an audit is wrong, and why; None: it cannot be said.

    >>> settle(AuditEvidence(owner=(1,), auditor=(2,), owner_again=(1,), auditor_again=(2,), referee=(2,)))[0]
    <Party.OWNER: 'owner'>
    """
    auditor_is_steady, owner_is_steady = evidence.is_auditor_steady, evidence.is_owner_steady
    if evidence.referee is None:
        if owner_is_steady and auditor_is_steady:
            return (
                None,
                "both hosts compute the same again, and there is no third host to tell which is wrong",
            )
        if owner_is_steady != auditor_is_steady:
            likely = Party.AUDITOR if owner_is_steady else Party.OWNER
            return (
                None,
                f"the result of the {likely} differs on each recomputation, but there is no third host to confirm it",
            )
        return None, "the results of both hosts differ on each recomputation"
    if auditor_is_steady and evidence.referee == evidence.auditor:
        return Party.OWNER, _describe_error(is_steady=owner_is_steady)
    if owner_is_steady and evidence.referee == evidence.owner:
        return Party.AUDITOR, _describe_error(is_steady=auditor_is_steady)
    return None, "no two hosts compute the same twice: what is computed differs from run to run"


def _describe_error(*, is_steady: bool) -> str:
    return "it computes the same wrong bits again" if is_steady else "its result changed on recomputation"
