"""Which findings measurements have confirmed, and how often: one is enough to name a host, not to act on it. Pure.

    open --confirmed--> named --confirmed again--> settled
    open or named --not confirmed--> open, and measured again

What a measurement shows once may be a busy moment of the machine. So a host is named at once, for whoever looks, and
measured a second time before anything is done about it. A finding of kind `INPUT` or `OTHER` is settled when it is
named: a host's own steps say it, or two measurements that have found nothing.
"""

import enum
from collections.abc import Iterable

import msgspec

from resilient_jax.health.confirmation import UNCONFIRMED_LIMIT
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.protocol.slow_hosts import COMMON_CAUSE_STEPS

NEEDED_CONFIRMATIONS = 2
MEASURED_KINDS = frozenset({FindingKind.COMPUTE, FindingKind.MEMORY, FindingKind.LINK})
"""What a measurement alone tells apart from a busy moment."""


class ReportChange(enum.Enum):
    """What a measurement changes in what is reported."""

    NOTHING_NEW = enum.auto()
    NAMED = enum.auto()
    """It is reported from now on."""
    WITHDRAWN = enum.auto()
    """It was reported, and is not any more."""


class ConfirmedFindings:
    """The findings of a job, as measurements have confirmed them.

    Attributes:
        reported: what is reported of open findings that were confirmed.
        carried: reported findings about work that a host no longer has: measurements of devices say when they end.
    """

    def __init__(self) -> None:
        self.reported: dict[Finding, Finding] = {}
        self.carried: set[Finding] = set()
        self._num_confirmed: dict[Finding, int] = {}
        self._num_refuted: dict[Finding, int] = {}

    def carry(self, finding: Finding) -> None:
        """Report a finding whose work is gone until its devices are found sound; it is settled."""
        self.reported.setdefault(finding, finding)
        self.carried.add(finding)

    def count_refuted(self, finding: Finding) -> int:
        """Return how many measurements have not confirmed a finding since it was opened, or settled."""
        return self._num_refuted.get(finding, 0)

    def is_settled(self, finding: Finding) -> bool:
        """Return whether nothing more is to be measured about a finding that is open."""
        reported = self.reported.get(finding)
        if reported is None:
            # What slows all links alike, or a busy machine, would be measured for ever.
            return not finding.host and self.count_refuted(finding) >= UNCONFIRMED_LIMIT
        return (
            finding in self.carried
            or reported.kind not in MEASURED_KINDS
            or self._num_confirmed.get(finding, 0) >= NEEDED_CONFIRMATIONS
        )

    def note(self, finding: Finding, confirmed: Finding | None) -> ReportChange:
        """Take in what a measurement has shown.

        Args:
            finding: finding that is open and not settled.
            confirmed: the finding as the measurement has confirmed it; None: the measurement has not confirmed it.
        """
        reported = self.reported.get(finding)
        if confirmed is None or (reported is not None and reported.host != confirmed.host):
            self._num_refuted[finding] = self.count_refuted(finding) + 1
            self._num_confirmed.pop(finding, None)
            return ReportChange.NOTHING_NEW if reported is None else ReportChange.WITHDRAWN
        self._num_confirmed[finding] = self._num_confirmed.get(finding, 0) + 1
        if reported is not None:
            # Of its devices those that both measurements have shown.
            devices = tuple(one for one in reported.slow_devices if one in confirmed.slow_devices)
            self.reported[finding] = msgspec.structs.replace(reported, slow_devices=devices)
            if self.is_settled(finding):
                self._num_refuted.pop(finding, None)
            return ReportChange.NOTHING_NEW
        self.reported[finding] = confirmed
        return ReportChange.NAMED

    def replace_carried(self, host: str) -> float:
        """Drop what is carried about a host that is named by its work again; return the factor, 1 if there is none."""
        factor = 1.0
        for carried in [one for one in self.carried if one.host == host]:
            factor = max(factor, self.withdraw(carried).factor)
            self.carried.discard(carried)
        return factor

    def withdraw(self, finding: Finding) -> Finding:
        """Report a finding no more, and return what was reported; it may still be open."""
        self.carried.discard(finding)
        return self.reported.pop(finding)

    def forget(self, finding: Finding) -> None:
        """Forget what measurements of a finding have shown: it is over."""
        self._num_confirmed.pop(finding, None)
        self._num_refuted.pop(finding, None)

    def may_act_on(self, host: str, findings: Iterable[Finding]) -> bool:
        """Return whether it is known for certain that a host is slow, and whether it alone is.

        It is not as long as another one that may have become slow for the same cause, at the same time, is to be
        measured: then nothing should be done about the first of them that happened to be confirmed.

        Args:
            findings: all open findings.
        """
        own = [finding for finding, reported in self.reported.items() if reported.host == host]
        if not all(map(self.is_settled, own)):
            return False
        return all(
            self.is_settled(other) or not any(_may_have_one_cause(self.reported[one], other) for one in own)
            for other in findings
        )


def _may_have_one_cause(reported: Finding, other: Finding) -> bool:
    # Of links it is only known that one of them is slow, until they are measured.
    if (reported.kind is FindingKind.LINK) != (other.kind is FindingKind.LINK):
        return False
    return abs(other.since_step - reported.since_step) <= COMMON_CAUSE_STEPS
