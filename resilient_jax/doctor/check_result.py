"""What a check of the machine found, and what to do about it."""

import enum
import types
from collections.abc import Mapping

import msgspec


class CheckVerdict(enum.StrEnum):
    """How bad it is what a check found."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but slower, or recover in another way."""
    PROBLEM = "problem"
    """Jobs do not run, or do not survive a failure."""
    NOT_RUN = "not_run"
    """The check makes no sense here, or what it needs failed before."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        group: what the check is about, such as "versions".
        name: name of the check, unique in its group.
        found: one line for people: what was found.
        remedy: what to do about the finding; empty if there is nothing to do.
        figures: what was measured, by name, with the unit as its last word.
        details: longer text for a person who looks closer, such as a topology.
    """

    group: str
    name: str
    verdict: CheckVerdict
    found: str
    remedy: str = ""
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    details: str = ""


def judge(
    group: str,
    name: str,
    found: str,
    *,
    is_bad: bool,
    remedy: str,
    verdict: CheckVerdict = CheckVerdict.WARNING,
    figures: Mapping[str, float] = types.MappingProxyType({}),
) -> CheckResult:
    """Return the result of a check of one fact: ok, or, if it is bad, this verdict with the remedy."""
    return CheckResult(
        group=group,
        name=name,
        verdict=verdict if is_bad else CheckVerdict.OK,
        found=found,
        remedy=remedy if is_bad else "",
        figures=dict(figures),
    )


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all checks of one machine.

    Attributes:
        platform: the devices that the machine was examined for, "cpu" or "gpu".
        results: results in the order of the checks.
    """

    platform: str
    results: tuple[CheckResult, ...]

    def count(self, verdict: CheckVerdict) -> int:
        """Return how many checks ended like this."""
        return sum(result.verdict is verdict for result in self.results)
