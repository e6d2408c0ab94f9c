"""Hosts that accumulate other things, or by another program, are found; what is not known differs from nothing."""

import pytest

from resilient_jax.program_analysis.program_digest import ProgramDescription
from resilient_jax.step.accumulation_comparison import find_differing_hosts
from resilient_jax.step.microbatch_program import MICROBATCH, UPDATE
from tests.support.summing_hosts import SummingHosts

PROGRAMS = {
    "a": ProgramDescription(b"a" * 16, ("operation tanh float32[3]: 1 times", "program: aa")),
    "b": ProgramDescription(b"b" * 16, ("operation sin float32[3]: 1 times", "program: bb")),
    "-": None,
}


def know(name, what=MICROBATCH):
    program = PROGRAMS[name]
    return {} if program is None else {what: program}


def compare(programs, lines, what=MICROBATCH):
    """Call every host's comparison at once, each on a thread, with an all-reduce among them."""

    def find(exchange):
        host = exchange.host_index
        return find_differing_hosts(lines[host], know(programs[host], what), exchange)

    found = SummingHosts(len(programs)).run(find)
    assert all(one == found[0] for one in found), "all hosts find the same"
    return found[0]


@pytest.mark.parametrize("programs", ["aaa", "a-a", "-a", "---"])
def test_what_is_not_known_differs_from_nothing(programs):
    assert compare(programs, [["reduction: exact"]] * len(programs)) is None


def test_the_host_with_another_program_is_named_with_what_it_has():
    found = compare("a-ab", [["reduction: exact"]] * 4)
    assert found is not None
    assert (found.hosts, found.has_majority) == ((3,), True)
    assert found.why == (
        "of the program of a microbatch, operation tanh float32[3]: found none, expected 1 times; "
        "operation sin float32[3]: found 1 times, expected none"
    )


def test_without_a_majority_all_that_were_compared_are_named():
    found = compare("-ab", [["reduction: exact"]] * 3)
    assert found is not None
    assert (found.hosts, found.has_majority) == ((1, 2), False)


def test_what_is_added_up_is_compared_first():
    found = compare("aab", [["reduction: exact"], ["reduction: fast"], ["reduction: exact"]])
    assert found is not None
    assert (found.hosts, found.why) == ((1,), "reduction: found fast, expected exact")


def test_the_update_is_compared_too():
    found = compare("aab", [["reduction: exact"]] * 3, what=UPDATE)
    assert found is not None
    assert found.hosts == (2,)
    assert found.why.startswith("of the program of the update, operation tanh")
