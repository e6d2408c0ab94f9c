"""What follows from audits: who is verified up to which step, and what happens to a host that computes wrongly.

A host that was named is taken out. If all of the state that the step begins with was finished before the host's
computations were last verified, the others finish the step without it. Else what was committed since is in doubt: every
host is unwound with the newest step that is not, and the job goes back to a state of at most so many steps.
"""

import os
import sys
from collections.abc import Sequence

from resilient_jax.errors import ComputationsDiffer
from resilient_jax.events import EventKind
from resilient_jax.host_exchange import MAX_INTEGER_BYTES, CollectiveExchange
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from resilient_jax.step.audit import MIN_HOSTS_TO_SETTLE
from resilient_jax.step.audit_run import AuditFinding
from resilient_jax.worker.audit_record import AuditRecord
from resilient_jax.worker.training_control import CorruptionFound, TrainingControl


class AuditResponse:
    """The audits of one generation.

    Args:
        hosts: hosts of the generation, in order of their indexes.
        record: record that outlives the generation.
    """

    def __init__(
        self,
        generation: GenerationNumber,
        hosts: Sequence[HostName],
        host: HostName,
        control: TrainingControl,
        record: AuditRecord,
    ) -> None:
        self._generation = generation
        self._hosts = tuple(hosts)
        self._host = host
        self._control = control
        self._record = record
        self._has_warned = False

    def begin(self, step: int, hosts: CollectiveExchange) -> None:
        """Take over what the host knows that has trained last, as all hosts do; see `AuditRecord.take_over`."""
        told, newest = [self._record.describe(self._host)], self.list_verified_steps()
        if hosts.num_hosts > 1:
            told = hosts.gather(told[0])
            # The first of those that have trained last: all hosts know which that is.
            last = max(range(hosts.num_hosts), key=lambda host: told[host].generation)
            room_bytes = MAX_INTEGER_BYTES * (1 + len(newest))
            (newest,) = hosts.gather(newest, speakers=[last], room_bytes=room_bytes)
        self._record.take_over(self._generation, self._hosts, step, told, newest)

    def pass_audit(self, indexes: Sequence[int], step: int) -> None:
        """Record that these hosts computed in a step what others did."""
        names = [self._hosts[index] for index in indexes]
        self._record.pass_audit(names, step)
        if self._host == self._hosts[0]:
            self._control.record_event(EventKind.AUDIT_PASSED, step=step, hosts=", ".join(names))

    @property
    def verified_step(self) -> int:
        """How many steps were done when every live host was last verified by an audit.

        A state of at most so many steps was touched by no host that an audit of today finds to compute wrongly, unless
        it errs only now and then.
        """
        return max(0, min(self.list_verified_steps()))

    def list_verified_steps(self) -> tuple[int, ...]:
        """See `AuditRecord.list_steps`."""
        return self._record.list_steps(self._hosts)

    def fail_audit(self, findings: Sequence[AuditFinding], step: int) -> None:
        """Take out the hosts that compute wrongly, or report that none could be told.

        Return if the step may be finished.

        Raises:
            CorruptionFound: states that were committed are in doubt.
            ComputationsDiffer: no host can be named, because there are only two.
        """
        corrupt = sorted({finding.corrupt for finding in findings if finding.corrupt is not None})
        for finding in findings:
            self._report(finding, step)
        if not corrupt:
            self._report_unsettled(findings[0], step)
            return
        verified_steps = self.list_verified_steps()
        trusted = max(0, min(verified_steps[index] for index in corrupt))
        hosts = tuple(self._hosts[index] for index in corrupt)
        why = (
            f"{', '.join(hosts)} computes wrongly: audits of step {step} found another result of microbatch "
            f"{findings[0].microbatch} on it than on two other hosts; {findings[0].why}"
        )
        is_this_host = self._host in hosts
        if trusted < step:
            text = f"{why}. States of more than {trusted} steps are in doubt"
            raise CorruptionFound(text, trusted_step=trusted, corrupt_hosts=hosts, is_this_host=is_this_host)
        if is_this_host:
            leave_as_corrupt(self._control, why)

    def _report(self, finding: AuditFinding, step: int) -> None:
        compared = [i for i in (finding.owner, finding.auditor, finding.referee) if i is not None]
        self._control.record_event(
            EventKind.AUDIT_FAILED,
            step=step,
            microbatch=finding.microbatch,
            compared=", ".join(self._hosts[index] for index in compared),
            corrupt=self._hosts[finding.corrupt] if finding.corrupt is not None else "",
            why=finding.why,
        )

    def _report_unsettled(self, finding: AuditFinding, step: int) -> None:
        """Stop if two hosts are all there are; else go on, and warn: computations are not reproducible."""
        names = f"{self._hosts[finding.owner]} and {self._hosts[finding.auditor]}"
        found = f"audit of step {step}: found different results of microbatch {finding.microbatch} on {names}"
        if len(self._hosts) < MIN_HOSTS_TO_SETTLE and finding.is_reproducible:
            raise ComputationsDiffer(
                f"{found}, expected the same bits. {finding.why}. One of them computes wrongly, and states of more "
                f"than {self.verified_step} steps are in doubt. Find out which with `resilient-jax "
                "replay`, and go on without it from a checkpoint of at most so many steps; with three hosts a job does "
                "so by itself"
            )
        if not self._has_warned and self._host == self._hosts[0]:
            self._has_warned = True
            sys.stderr.write(
                f"{found}, expected the same bits: {finding.why}. Loss and data must be pure functions, and programs "
                "deterministic (on GPUs --xla_gpu_deterministic_ops=true); without that neither audits nor recovery "
                "give equal bits. audit_share = 0 turns audits off\n"
            )
            sys.stderr.flush()


def leave_as_corrupt(control: TrainingControl, why: str) -> None:
    """End this process, and with it this host's part in the job: its agent does not start another."""
    control.record_event(EventKind.HOST_CORRUPT, why=why)
    # At once: to unwind would wait for peers that wait for this host.
    os._exit(RESTART_EXIT_CODE)
