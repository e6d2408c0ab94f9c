"""The audits of one generation: draws them, has them run, and says what was found to whoever acts on it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.step.assignment import AccumulationSpec, Assignment
from resilient_jax.step.audit import Audit, draw_audits, list_audited_hosts
from resilient_jax.step.audit_run import AuditFinding, OwnResults, run_audits


class AuditResponder(Protocol):
    """Knows how far each host is verified, and acts on what audits find. Hosts are given by their indexes."""

    def begin(self, step: int, hosts: CollectiveExchange) -> None:
        """Have all hosts know the same of each other, before the first audit of a generation. All must call this.

        Args:
            step: number of the step that the generation begins with.
        """
        ...

    def pass_audit(self, indexes: Sequence[int], step: int) -> None:
        """Record that these hosts computed what others did of the microbatches that were compared."""
        ...

    def fail_audit(self, findings: Sequence[AuditFinding], step: int) -> None:
        """Take out the hosts that compute wrongly, or report that none could be told.

        Return if the step may be finished: with what was found nothing that was committed is in doubt.

        Args:
            findings: the same on all hosts.
            step: the one that is audited.
        """
        ...


class Auditor:
    """The audits of one generation.

    Args:
        share: part of all microbatches that two hosts compute, from 0 to 1.
        responder: acts on what is found.
    """

    def __init__(self, share: float, responder: AuditResponder) -> None:
        self._share = share
        self._responder = responder
        self._has_begun = False

    def draw(
        self, spec: AccumulationSpec, assignment: Assignment, hosts: CollectiveExchange
    ) -> tuple[Audit, ...]:
        """Return the audits of an accumulation, the same on all hosts. All must call this."""
        if not self._has_begun:
            self._responder.begin(spec.step, hosts)
            self._has_begun = True
        return draw_audits(spec, assignment, self._share)

    def run(
        self,
        audits: Sequence[Audit],
        spec: AccumulationSpec,
        assignment: Assignment,
        own: OwnResults,
        hosts: CollectiveExchange,
    ) -> None:
        """Return if what was computed may be reduced. All hosts must call this; see `run_audits`."""
        findings = run_audits(audits, assignment, own, hosts.add_up)
        if findings:
            # The first to act on this ends the generation: not before all know it, above all the host that is to leave.
            try:
                hosts.all_reduce(np.zeros(1, np.int32))
            finally:
                self._responder.fail_audit(findings, spec.step)
        else:
            self._responder.pass_audit(list_audited_hosts(audits, assignment), spec.step)
