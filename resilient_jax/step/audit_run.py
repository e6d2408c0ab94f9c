"""Carries out the audits of a step: computes, exchanges digests, settles what differs. A collective of all hosts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from resilient_jax.compile.training_threads import mark_training_thread
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.state_digest import DIGEST_WORDS, digest_state
from resilient_jax.step.assignment import Assignment
from resilient_jax.step.audit import Audit, AuditEvidence, Digest, Party, settle

ComputeDigest = Callable[[int, int], Digest]
"""Computes a microbatch, by its index, on a replica of this host, by its number; returns the digest of the result."""


class OwnResults(NamedTuple):
    """What this host has computed, and can compute.

    Attributes:
        digests: results of its microbatches that are audited, by index.
        replicas: the numbers of its replicas.
        doubt: called once results are found to differ, before more is computed: the sums that have them are void if
            this generation ends meanwhile.
    """

    digests: Mapping[int, Digest]
    replicas: frozenset[int]
    compute: ComputeDigest
    doubt: Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """A microbatch of which two hosts had different results.

    Attributes:
        microbatch: position of the microbatch in the step.
        owner: the index of the host whose total has it.
        auditor: the index of the host that computed it for comparison.
        referee: the index of the third host; None: there is none.
        corrupt: the index of the host that is wrong; None: it cannot be said.
        is_reproducible: whether one of the two at least has computed the same bits twice.
        why: reason for naming that host, or for naming none.
    """

    microbatch: int
    owner: int
    auditor: int
    referee: int | None
    corrupt: int | None
    is_reproducible: bool
    why: str


def digest_result(result: Any) -> Digest:  # noqa: ANN401 - a tree of arrays
    """Return the digest of what was computed of a microbatch."""
    return tuple(digest_state(flatten_state(0, result))[1 : 1 + DIGEST_WORDS].tolist())


def run_audits(
    audits: Sequence[Audit],
    assignment: Assignment,
    own: OwnResults,
    add_up: Callable[[np.ndarray], np.ndarray],
) -> list[AuditFinding]:
    """Return the audits in which results differ, settled as far as possible. All hosts must call this.

    Args:
        audits: all audits of the step, the same on all hosts.
        assignment: where the replicas are.
        add_up: returns the sum over hosts of an integer array.
    """

    def exchange(work: Sequence[tuple[int, int | None]], known: Mapping[int, Digest]) -> np.ndarray:
        """Return int32[work, words], the digests of all (microbatch, replica); zeros without a replica."""
        own_work = [
            (position, index, replica)
            for position, (index, replica) in enumerate(work)
            if replica in own.replicas
        ]
        # A replica is on one host, so one host fills in each row, all others add zeros, and the sum has all digests.
        table = np.zeros((len(work), DIGEST_WORDS), np.int32)
        for position, digest in _compute_all(own_work, known, own.compute):
            table[position] = digest
        return add_up(table)

    # Both sides in one exchange: what hosts compare costs a step one small all-reduce, as long as all is well.
    sides = [(a.microbatch, a.owner) for a in audits] + [(a.microbatch, a.auditor) for a in audits]
    owners, auditors = np.split(exchange(sides, own.digests), 2)
    differing = [i for i in range(len(audits)) if (owners[i] != auditors[i]).any()]
    if not differing:
        return []
    # From here on a failure would end the generation with a wrong total kept as if it were sound.
    own.doubt()
    doubtful = [audits[i] for i in differing]
    again = [
        exchange([(audit.microbatch, replica) for audit, replica in zip(doubtful, chosen, strict=True)], {})
        for chosen in (
            [audit.owner for audit in doubtful],
            [audit.auditor for audit in doubtful],
            [audit.referee for audit in doubtful],
        )
    ]
    findings = []
    for row, (position, audit) in enumerate(zip(differing, doubtful, strict=True)):
        owner_again, auditor_again, referee = (_to_digest(table[row]) for table in again)
        evidence = AuditEvidence(
            owner=_to_digest(owners[position]),
            auditor=_to_digest(auditors[position]),
            owner_again=owner_again,
            auditor_again=auditor_again,
            referee=None if audit.referee is None else referee,
        )
        findings.append(_describe_finding(audit, assignment, evidence))
    return findings


def _compute_all(
    work: Sequence[tuple[int, int, int]], known: Mapping[int, Digest], compute: ComputeDigest
) -> list[tuple[int, Digest]]:
    """Return the digest of each (position, microbatch, replica), of several replicas at a time."""
    by_replica: dict[int, list[tuple[int, int]]] = {}
    for position, index, replica in work:
        by_replica.setdefault(replica, []).append((position, index))

    def compute_some(replica: int) -> list[tuple[int, Digest]]:
        return [
            (position, known[index] if index in known else compute(replica, index))
            for position, index in by_replica[replica]
        ]

    if len(by_replica) <= 1:
        return [pair for replica in by_replica for pair in compute_some(replica)]
    with ThreadPoolExecutor(
        len(by_replica), "resilient-jax-audit", initializer=mark_training_thread
    ) as threads:
        return [pair for pairs in threads.map(compute_some, by_replica) for pair in pairs]


def _to_digest(row: np.ndarray) -> Digest:
    return tuple(row.tolist())


def _describe_finding(audit: Audit, assignment: Assignment, evidence: AuditEvidence) -> AuditFinding:
    party, why = settle(evidence)
    owner, auditor = (assignment.locations[r].host_indexes[0] for r in (audit.owner, audit.auditor))
    referee = None if audit.referee is None else assignment.locations[audit.referee].host_indexes[0]
    return AuditFinding(
        microbatch=audit.microbatch,
        owner=owner,
        auditor=auditor,
        referee=referee,
        corrupt={Party.OWNER: owner, Party.AUDITOR: auditor, None: None}[party],
        is_reproducible=evidence.is_owner_steady or evidence.is_auditor_steady,
        why=why,
    )
