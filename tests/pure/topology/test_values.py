"""Queries of a topology: peaks, bandwidths, levels, failure domains, classes of hosts, patterns of names."""

import doctest
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError, ExitCode
from resilient_jax.ids import HostName
from resilient_jax.topology import (
    Accelerator,
    FailureDomain,
    Host,
    HostClass,
    LinkLevel,
    NumberFormat,
    Peak,
    Port,
    Topology,
    TopologyError,
    UnknownHost,
    decode_topology,
    host_names,
    topology,
)
from resilient_jax.topology.host_names import expand_pattern
from tests.support.topologies import CHIP, LEVELS, SMALL, TEXT, host


def test_a_file_and_values_made_by_hand_are_the_same_topology():
    assert decode_topology(TEXT, source="small.toml") == SMALL


def test_a_topology_has_a_short_repr():
    assert repr(SMALL) == "Topology('small': 8 hosts, 32 devices)"


def test_a_topology_can_be_a_key_and_can_be_sent_to_another_process():
    assert {SMALL: 1}[pickle.loads(pickle.dumps(SMALL))] == 1


@pytest.mark.parametrize("module", [topology, host_names], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_peak_is_given_by_number_format():
    assert CHIP.peak_flops_per_s("bf16") == CHIP.peak_flops_per_s(NumberFormat.BF16) == 1e14


@pytest.mark.parametrize("number_format", ["fp8", "bfloat16"])
def test_an_unknown_peak_is_refused_and_not_replaced_by_another(number_format):
    with pytest.raises(TopologyError) as refusal:
        CHIP.peak_flops_per_s(number_format)
    assert str(refusal.value) == (
        f"accelerator 'chip': found no peak for '{number_format}', expected one of bf16. Choose one of these, or add "
        f"peak_flops_per_s.{number_format} to the topology file"
    )


def test_a_device_with_a_port_of_its_own_does_not_share_it():
    assert [LEVELS[0].bandwidth_of_device(senders) for senders in (1, 4)] == [1e11, 1e11]


def test_devices_of_a_host_share_its_port():
    assert [LEVELS[1].bandwidth_of_device(senders) for senders in (1, 2, 4)] == [1e10, 5e9, 2.5e9]


def test_an_oversubscribed_level_divides_the_bandwidth_of_each_device():
    assert LEVELS[3].bandwidth_of_device(1) == 2.5e9


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [
        ("host-0", "host-0", "host"),
        ("host-0", "host-1", "rack"),
        ("host-1", "host-2", "pod"),
        ("host-3", "host-4", "cluster"),
    ],
)
def test_two_hosts_communicate_over_the_innermost_level_that_has_both(first, second, level):
    assert SMALL.level_between(first, second).name == SMALL.level_between(second, first).name == level


def test_a_host_s_failure_domains_are_given_from_the_host_outward():
    assert SMALL.failure_domains("host-5") == (
        FailureDomain(level="host", name="host-5"),
        FailureDomain(level="rack", name="rack-2"),
        FailureDomain(level="pod", name="pod-1"),
    )


def test_the_level_that_has_all_hosts_is_no_failure_domain():
    assert SMALL.failure_levels == ("host", "rack", "pod")
    with pytest.raises(
        TopologyError, match="found no failure domains 'cluster', expected one of host, rack, pod"
    ):
        SMALL.domains("cluster")


def test_each_failure_domain_has_its_hosts():
    racks = SMALL.without("host-0", "host-2", "host-3").domains("rack")
    assert [(rack.domain.name, rack.hosts, rack.device_count) for rack in racks] == [
        ("rack-0", ("host-1",), 4),
        ("rack-2", ("host-4", "host-5"), 8),
        ("rack-3", ("host-6", "host-7"), 8),
    ]


@pytest.mark.parametrize("level", SMALL.failure_levels)
def test_each_host_is_in_one_domain_of_each_level(level):
    groups = SMALL.domains(level)
    assert [name for group in groups for name in group.hosts] == [host.name for host in SMALL.hosts]
    assert SMALL.domain_of(level) == {name: group.domain.name for group in groups for name in group.hosts}


def test_hosts_that_compute_alike_are_one_class_with_a_count():
    assert SMALL.classes == (HostClass(accelerator=CHIP, devices=4, speed=1.0, hosts=8),)
    slowed = SMALL.slowed("host-1", 0.5).slowed("host-6", 0.5)
    assert [(kind.speed, kind.hosts, kind.device_count) for kind in slowed.classes] == [
        (1.0, 6, 24),
        (0.5, 2, 8),
    ]


def test_equal_accelerators_are_one_class_even_if_they_were_read_twice():
    other = decode_topology(TEXT, source="small.toml")
    mixed = SMALL.without("host-0").with_hosts([other.host("host-0")])
    assert len(mixed.classes) == len(mixed.accelerators) == 1


def test_each_accelerator_of_a_mixed_cluster_is_listed_once():
    old = Accelerator(
        name="old",
        peaks=(Peak(number_format=NumberFormat.FP32, flops_per_s=1e12),),
        memory_bytes=10**9,
        memory_bandwidth_bytes_per_s=1e11,
    )
    extra = Host(name=HostName("host-8"), accelerator=old, devices=2, domains=("rack-4", "pod-2"))
    mixed = SMALL.with_hosts([extra])
    assert mixed.accelerators == (CHIP, old)
    assert mixed.device_count == 34


@given(seed=st.randoms())
def test_the_same_hosts_in_any_order_are_the_same_topology(seed: random.Random):
    hosts = list(SMALL.hosts)
    seed.shuffle(hosts)
    assert Topology(name="small", levels=LEVELS, hosts=tuple(hosts)) == SMALL


def test_hosts_are_sorted_by_domain_and_numbers_in_names_by_value():
    two = (LEVELS[0], LEVELS[1], LEVELS[3])
    places = {"host-10": "rack-2", "host-9": "rack-2", "host-1": "rack-10", "a": "rack-10"}
    hosts = tuple(
        Host(name=HostName(name), accelerator=CHIP, devices=1, domains=(rack,))
        for name, rack in places.items()
    )
    assert [host.name for host in Topology(name="t", levels=two, hosts=hosts).hosts] == [
        "host-9",
        "host-10",
        "a",
        "host-1",
    ]


PATTERNS = {
    "host-0": ["host-0"],
    "host-{0..2}": ["host-0", "host-1", "host-2"],
    "h{08..10}": ["h08", "h09", "h10"],
    "h{8..10}": ["h8", "h9", "h10"],
    "{10..11}.example.org": ["10.example.org", "11.example.org"],
    "r{1..2}h{01..02}": ["r1h01", "r1h02", "r2h01", "r2h02"],
    "h{5..5}": ["h5"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_stands_for_these_names(pattern):
    assert list(expand_pattern(pattern)) == PATTERNS[pattern]


WRONG_PARTS = {
    "a level that is infinitely fast": lambda: LinkLevel(
        name="rack", bandwidth_bytes_per_s=float("inf"), port=Port.HOST, latency_s=0
    ),
    "a negative bandwidth": lambda: LinkLevel(
        name="rack", bandwidth_bytes_per_s=-1, port=Port.HOST, latency_s=0
    ),
    "a negative latency": lambda: LinkLevel(
        name="rack", bandwidth_bytes_per_s=1, port=Port.HOST, latency_s=-1e-6
    ),
    "a level that carries more than it is sent": lambda: LinkLevel(
        name="rack", bandwidth_bytes_per_s=1, port=Port.HOST, latency_s=0, oversubscription=0.5
    ),
    "no memory": lambda: Accelerator(
        name="chip", peaks=CHIP.peaks, memory_bytes=0, memory_bandwidth_bytes_per_s=1e12
    ),
    "a peak that is not a number": lambda: Accelerator(
        name="chip",
        peaks=(Peak(number_format=NumberFormat.BF16, flops_per_s=float("nan")),),
        memory_bytes=1,
        memory_bandwidth_bytes_per_s=1,
    ),
    "a host without devices": lambda: Host(name=HostName("h"), accelerator=CHIP, devices=0),
    "a host that is faster than healthy": lambda: Host(
        name=HostName("h"), accelerator=CHIP, devices=1, speed=1.5
    ),
    "no hosts": lambda: Topology(name="t", levels=LEVELS, hosts=()),
    "no links": lambda: Topology(name="t", levels=(), hosts=(host(0),)),
    "links between hosts only": lambda: Topology(name="t", levels=LEVELS[1:], hosts=(host(0),)),
    "hosts that nothing connects": lambda: Topology(name="t", levels=LEVELS[:1], hosts=SMALL.hosts),
    "a domain too few": lambda: Topology(name="t", levels=LEVELS[:2], hosts=(host(0),)),
    "a host twice": lambda: Topology(name="t", levels=LEVELS, hosts=(*SMALL.hosts, host(3))),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_invalid_values_are_refused(case):
    with pytest.raises(TopologyError, match=r"found .*, expected "):
        WRONG_PARTS[case]()


def test_a_rack_in_two_pods_is_refused():
    wrong = Host(name=HostName("x"), accelerator=CHIP, devices=4, domains=("rack-0", "pod-1"))
    with pytest.raises(TopologyError) as refusal:
        SMALL.with_hosts([wrong])
    assert str(refusal.value) == (
        "rack 'rack-0': found it in pod 'pod-0' and, with host 'x', in 'pod-1', expected it in one of them. Give two "
        "domains two names"
    )


QUESTIONS = {
    "host": lambda: SMALL.host("host-11"),
    "level_between": lambda: SMALL.level_between("host-1", "host-11"),
    "failure_domains": lambda: SMALL.failure_domains("host-11"),
    "without": lambda: SMALL.without("host-1", "host-11"),
    "slowed": lambda: SMALL.slowed("host-11", 0.5),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_host_that_does_not_exist_is_refused_by_name_with_the_nearest_ones(question):
    with pytest.raises(UnknownHost) as refusal:
        QUESTIONS[question]()
    assert str(refusal.value) == (
        "host 'host-11': found no such host in topology 'small', expected one of its 8 hosts (host-0 to host-7); one "
        "that was lost is no longer among them. Did you mean host-1 or host-7 or host-6?"
    )


def test_an_unknown_host_is_the_caller_s_mistake():
    with pytest.raises(CallerError, match="Check the name") as refusal:
        SMALL.host("zzz")
    assert refusal.value.exit_code is ExitCode.USAGE
