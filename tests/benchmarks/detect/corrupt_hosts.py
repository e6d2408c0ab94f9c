"""Simulated jobs in which a host computes wrong bits: how soon audits name it, and whether they name another."""

import random
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from resilient_jax.ids import ProcessIndex
from resilient_jax.step.assignment import (
    AccumulationSpec,
    Assignment,
    ReplicaShape,
    assign_microbatches,
    locate_replicas,
)
from resilient_jax.step.audit import Audit, AuditEvidence, Digest, Party, draw_audits, settle

HOSTS: Final = (3, 4, 8, 64)
MICROBATCHES_PER_HOST: Final = (1, 2, 8)
SHARE: Final = 0.01
"""Of microbatches: ten times the default, so that there are as many audits in a tenth of the steps."""
MAX_AUDITS: Final = 3
MAX_STEPS: Final = 10_000


class CorruptHostVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What audits made of one job with a host that computes wrongly.

    Attributes:
        audits: how many audits it had a part in until it was named; None: it was not named in `MAX_STEPS`.
        false_names: other hosts that were named until then.
    """

    audits: int | None
    false_names: int


class SimulatedHosts:
    """Hosts that compute microbatches, one of which does so wrongly.

    Args:
        seed: of the job: its hosts, its microbatches, and when the host errs.
        error_rate: the share of microbatches of which the host's result is wrong, another one each time.
    """

    def __init__(self, seed: str, error_rate: float) -> None:
        self._chance = random.Random(seed)
        self._error_rate = error_rate
        num_hosts = self._chance.choice(HOSTS)
        self._corrupt = self._chance.randrange(num_hosts)
        self._num_microbatches = num_hosts * self._chance.choice(MICROBATCHES_PER_HOST)
        locations = locate_replicas(
            [ProcessIndex(index) for index in range(num_hosts)], ReplicaShape(), [1] * num_hosts
        )
        claims = np.zeros((num_hosts, self._num_microbatches), bool)
        self._assignment: Assignment = assign_microbatches(locations, claims, np.ones(num_hosts))

    def judge(self) -> CorruptHostVerdict:
        """Run the job until the host is named."""
        num_audits = false_names = 0
        for audit in self._draw():
            named = self._settle(audit)
            num_audits += self._corrupt in (audit.owner, audit.auditor)
            if named == self._corrupt:
                return CorruptHostVerdict(audits=num_audits, false_names=false_names)
            false_names += named is not None
        return CorruptHostVerdict(audits=None, false_names=false_names)

    def _draw(self) -> Iterator[Audit]:
        for step in range(MAX_STEPS):
            spec = AccumulationSpec(
                name="loss", step=step, num_microbatches=self._num_microbatches, reduction="exact"
            )
            yield from draw_audits(spec, self._assignment, SHARE)

    def _settle(self, audit: Audit) -> int | None:
        """Return the host that an audit names. A replica is a host here."""
        owner, auditor = (self._compute(audit, host) for host in (audit.owner, audit.auditor))
        if owner == auditor:
            return None
        party, _ = settle(
            AuditEvidence(
                owner=owner,
                auditor=auditor,
                owner_again=self._compute(audit, audit.owner),
                auditor_again=self._compute(audit, audit.auditor),
                referee=None if audit.referee is None else self._compute(audit, audit.referee),
            )
        )
        return {Party.OWNER: audit.owner, Party.AUDITOR: audit.auditor, None: None}[party]

    def _compute(self, audit: Audit, host: int) -> Digest:
        is_wrong = host == self._corrupt and self._chance.random() < self._error_rate
        return (audit.microbatch, self._chance.getrandbits(31) if is_wrong else 0)


def judge_corrupt_hosts(num_jobs: int, error_rate: float, half: str) -> list[CorruptHostVerdict]:
    """Return the verdicts of so many jobs of a half of the seeds."""
    return [SimulatedHosts(f"{half} {error_rate} {number}", error_rate).judge() for number in range(num_jobs)]


def find_share_found(verdicts: Sequence[CorruptHostVerdict]) -> float:
    """Return the share of hosts that were named within `MAX_AUDITS` audits of them."""
    return sum(v.audits is not None and v.audits <= MAX_AUDITS for v in verdicts) / len(verdicts)
