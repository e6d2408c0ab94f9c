"""Which findings are named, and which are certain enough to act on."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.health.confirmed_findings import ConfirmedFindings, ReportChange
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.protocol.slow_hosts import COMMON_CAUSE_STEPS

LINKS = Finding(host="", kind=FindingKind.LINK, factor=3.0, since_step=100, evidence="")


def find(host: str, since_step: int = 100, kind: FindingKind = FindingKind.COMPUTE) -> Finding:
    return Finding(host=host, kind=kind, factor=2.0, since_step=since_step, evidence="")


def on(host: str) -> Finding:
    """Return the finding about links as one about a host's."""
    return find(host, kind=FindingKind.LINK)


def test_one_measurement_names_a_host_and_a_second_one_allows_to_act() -> None:
    slow, found = find("a"), ConfirmedFindings()
    assert not found.is_settled(slow)
    assert found.note(slow, slow) is ReportChange.NAMED
    assert not found.is_settled(slow)
    assert not found.may_act_on("a", [slow])
    assert found.note(slow, slow) is ReportChange.NOTHING_NEW
    assert found.is_settled(slow)
    assert found.may_act_on("a", [slow])


def test_a_second_measurement_that_shows_nothing_withdraws_the_first() -> None:
    slow, found = find("a"), ConfirmedFindings()
    found.note(slow, slow)
    assert found.note(slow, None) is ReportChange.WITHDRAWN
    found.withdraw(slow)
    assert found.count_refuted(slow) == 1
    assert found.note(slow, slow) is ReportChange.NAMED
    assert not found.is_settled(slow), "the first one counts no more"


def test_a_link_on_another_host_each_time_is_the_fault_of_none_and_is_not_measured_for_ever() -> None:
    found, verdicts = ConfirmedFindings(), []
    for host in "abababab":
        if found.is_settled(LINKS):
            break
        verdict = found.note(LINKS, on(host))
        verdicts.append(verdict)
        if verdict is ReportChange.WITHDRAWN:
            found.withdraw(LINKS)
    assert verdicts == [ReportChange.NAMED, ReportChange.WITHDRAWN] * 2
    assert not found.reported


@pytest.mark.parametrize("kind", [FindingKind.INPUT, FindingKind.OTHER])
def test_what_its_own_steps_say_needs_no_second_measurement(kind: FindingKind) -> None:
    slow, found = find("a"), ConfirmedFindings()
    found.note(slow, find("a", kind=kind))
    assert found.is_settled(slow)


def test_a_host_that_is_slow_for_another_cause_is_not_waited_for() -> None:
    slow, found = find("a"), ConfirmedFindings()
    found.note(slow, slow)
    found.note(slow, slow)
    assert found.may_act_on("a", [slow, find("b", 100 + COMMON_CAUSE_STEPS + 1), LINKS])
    assert not found.may_act_on("a", [slow, find("b", 100 + COMMON_CAUSE_STEPS)])


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_of_a_rack_that_is_throttled_host_by_host_none_is_acted_on_alone(seed: int, hosts: int) -> None:
    """Each is suspected some steps after the one before, and measurements come when they come.

    As soon as something may be done about one of them, all that are slow by then are named.
    """
    chance, found = random.Random(seed), ConfirmedFindings()
    open_findings: list[Finding] = []
    waiting = [find(f"host-{n}", 100 + sum(chance.choices(range(10), k=n))) for n in range(hosts)]
    step = 100
    while waiting or not all(map(found.is_settled, open_findings)):
        step += chance.randrange(1, 20)
        while waiting and waiting[0].since_step < step:
            open_findings.append(waiting.pop(0))
        for slow in open_findings:
            if found.may_act_on(slow.host, open_findings) and slow in found.reported:
                assert set(open_findings) == set(found.reported)
        if chance.random() < 0.5:  # some of them at a time: of others it is not known
            for slow in open_findings:
                if not found.is_settled(slow) and chance.random() < 0.7:
                    found.note(slow, slow)
    assert all(found.may_act_on(slow.host, open_findings) for slow in open_findings)
