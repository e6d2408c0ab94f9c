"""The search equals brute force; more hardware never hurts; awkward numbers of hosts get good plans."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import ReplicaAxes, make_layout
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.plan_request import NO_FIXED_AXES
from resilient_jax.planning.search import search_plan
from resilient_jax.topology import TopologyError
from tests.pure.planning.brute_force_plans import find_least_step_s
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import chip, cluster, clusters, small_profile, tight_bytes, tight_clusters
from tests.support.properties import examples

PROFILE = small_profile()
DEEP = small_profile(layers=5, vocabulary_tokens=4)
"""A model that needs most of its memory for layers, so that a pipeline can be split in several ways."""
PRIME = {"heads": 1, "kv_heads": 1, "head_dim": 61, "width": 53, "feed_forward": 97, "sequence_tokens": 31}
"""Sizes that only a pipeline can divide, in steps of one sequence."""
ROUNDED = 1 + 1e-9


PIPELINES = {Axis.REPLICA: 2, Axis.TENSOR: 1, Axis.SEQUENCE: 1}
"""Mostly two pipelines: over slow links the all-reduce of their fullest stage is a large part of the step."""


def least_s(topology, global_batch=12, profile=PROFILE, min_replicas=1, axes=NO_FIXED_AXES):
    """Return the step time of the best plan; infinite if no plan fits."""
    try:
        plan = search_plan(profile, topology, global_batch=global_batch, axes=axes, min_replicas=min_replicas)
    except NoFeasiblePlan:
        return math.inf
    assert plan.replicas >= min_replicas
    return plan.step_time_s


@examples(few=5)
@given(clusters(), st.sampled_from([1, 4, 6]))
def test_the_search_equals_brute_force(topology, global_batch):
    wanted = find_least_step_s(PROFILE, topology, global_batch)
    assert least_s(topology, global_batch) == pytest.approx(wanted, rel=1e-9)


@examples(few=5)
@given(clusters(), st.sampled_from([4, 6]), st.data())
def test_the_search_with_min_replicas_equals_brute_force(topology, global_batch, data):
    least = data.draw(st.integers(2, global_batch))
    wanted = find_least_step_s(PROFILE, topology, global_batch, min_replicas=least)
    if least > topology.device_count:
        assert wanted == math.inf
        with pytest.raises(PlanError, match=f"min_replicas: found {least}, expected at most"):
            least_s(topology, global_batch, min_replicas=least)
    else:
        assert least_s(topology, global_batch, min_replicas=least) == pytest.approx(wanted, rel=1e-9)


@examples(few=5)
@given(tight_clusters(DEEP, most_hosts=3), st.sampled_from([1, 4]))
@example(cluster([1.0, 0.3], devices=1, network=1e7, memory_bytes=tight_bytes(DEEP, 0.7)), 1)
def test_the_search_equals_brute_force_over_every_split_of_layers_that_fits(topology, global_batch):
    wanted = find_least_step_s(DEEP, topology, global_batch)
    assert least_s(topology, global_batch, DEEP) == pytest.approx(wanted, rel=1e-9)


@examples(few=5)
@given(
    st.lists(st.sampled_from([1.0, 0.8, 0.6, 0.3]), min_size=3, max_size=4),
    st.floats(0.4, 0.95),
    st.sampled_from([1e6, 1e7]),
    st.sampled_from([2, 4]),
)
@example([0.6, 1.0, 1.0, 1.0], 0.9, 1e7, 2)
def test_the_search_equals_brute_force_where_the_fullest_stage_delays_the_update(
    speeds, share, network, global_batch
):
    profile = small_profile(layers=6, vocabulary_tokens=4)
    topology = cluster(speeds, devices=1, memory_bytes=tight_bytes(profile, share), network=network)
    wanted = find_least_step_s(profile, topology, global_batch, axes=PIPELINES)
    assert least_s(topology, global_batch, profile, axes=PIPELINES) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("hosts", [7, 13])
def test_the_search_equals_brute_force_for_awkward_numbers_of_hosts(hosts):
    topology = cluster([1.0] * (hosts - 1) + [0.6], devices=1)
    assert least_s(topology, 4) == pytest.approx(find_least_step_s(PROFILE, topology, 4), rel=1e-9)


def test_the_search_equals_brute_force_for_experts():
    profile = small_profile(experts=4, experts_per_token=2)
    topology = cluster([1.0, 1.0, 0.6], memory_bytes=75_000_000)
    assert least_s(topology, 4, profile) == pytest.approx(find_least_step_s(profile, topology, 4), rel=1e-9)


@examples(few=5)
@given(clusters(most_hosts=6), st.sampled_from([1.5, 10.0]), st.data())
def test_a_faster_link_never_makes_the_best_plan_slower(topology, factor, data):
    index = data.draw(st.integers(0, len(topology.levels) - 1))
    level = topology.levels[index]
    faster = dataclasses.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)
    levels = (*topology.levels[:index], faster, *topology.levels[index + 1 :])
    assert least_s(dataclasses.replace(topology, levels=levels)) <= least_s(topology) * ROUNDED


@examples(few=5)
@given(
    st.integers(4, 8),
    st.sampled_from([1, 2]),
    st.sampled_from([1.01, 1.5, 4.0]),
    st.sampled_from([1e7, 1e8]),
    st.sampled_from([0.0, 1e-5]),
    st.sampled_from([12, 64, 256]),
)
def test_a_link_that_becomes_as_fast_as_the_next_one_never_makes_the_best_plan_slower(
    hosts, devices, oversubscription, network, latency_s, global_batch
):
    slower, equal = (
        cluster(
            [1.0] * hosts,
            devices=devices,
            network=network,
            latency_s=latency_s,
            per_rack=2,
            oversubscription=factor,
        )
        for factor in (oversubscription, 1.0)
    )
    assert least_s(equal, global_batch) <= least_s(slower, global_batch) * ROUNDED


@examples(few=5)
@given(clusters(most_hosts=6), st.sampled_from([1.002, 1.05, 10.0]))
def test_more_memory_never_makes_the_best_plan_slower(topology, factor):
    more = [
        dataclasses.replace(
            host, accelerator=chip(int(host.accelerator.memory_bytes * factor)), domains=host.domains
        )
        for host in topology.hosts
    ]
    assert least_s(dataclasses.replace(topology, hosts=tuple(more))) <= least_s(topology) * ROUNDED


@examples(few=5)
@given(clusters(most_hosts=6), st.data())
def test_one_more_host_never_makes_the_best_plan_slower(topology, data):
    if len(topology.hosts) == 1:
        return
    lost = data.draw(st.sampled_from([host.name for host in topology.hosts]))
    assert least_s(topology) <= least_s(topology.without(lost)) * ROUNDED


@examples(few=5)
@given(clusters(most_hosts=6), st.data())
def test_a_host_that_heals_never_makes_the_best_plan_slower(topology, data):
    name = data.draw(st.sampled_from([host.name for host in topology.hosts]))
    assert least_s(topology.slowed(name, 1.0)) <= least_s(topology) * ROUNDED


@examples(few=5)
@given(st.integers(3, 7), st.integers(2, 3), st.floats(0.25, 0.6), st.sampled_from([0.8, 0.4, 0.1]))
def test_slowing_a_host_never_makes_a_feasible_request_infeasible(layers, hosts, share, speed):
    profile = small_profile(layers=layers, vocabulary_tokens=4, **PRIME)
    topology = cluster([1.0] * hosts, devices=1, memory_bytes=tight_bytes(profile, share), network=1e9)
    slowed = topology.slowed("host-01", speed)
    assert math.isfinite(least_s(slowed, 1, profile)) == math.isfinite(least_s(topology, 1, profile))


@examples(few=5)
@given(tight_clusters(DEEP), st.integers(0, 3))
@example(cluster([0.3, 0.3], network=1e7, latency_s=0.0, memory_bytes=tight_bytes(DEEP, 0.4)), 0)
def test_a_host_more_or_one_that_heals_never_makes_the_best_plan_slower_where_memory_is_tight(
    topology, index
):
    name = topology.hosts[index % len(topology.hosts)].name
    now = least_s(topology, 4, DEEP)
    assert least_s(topology.slowed(name, 1.0), 4, DEEP) <= now * ROUNDED
    assert now <= least_s(topology.without(name), 4, DEEP) * ROUNDED


LONG = small_profile(layers=12, vocabulary_tokens=4)


@examples(few=5)
@given(
    st.lists(st.sampled_from([1.0, 0.8, 0.6, 0.3]), min_size=4, max_size=5),
    st.sampled_from([1, 2]),
    st.floats(0.3, 0.9),
    st.sampled_from([1e6, 1e7]),
    st.sampled_from([1.02, 1.2, 2.0]),
)
@example([1.0, 0.3, 0.8, 1.0], 1, 0.4, 1e6, 2.0)
@example([0.6, 0.6, 0.6, 0.6], 1, 0.9, 1e6, 2.0)
def test_more_of_any_hardware_never_makes_the_best_pipelines_slower(speeds, devices, share, network, factor):
    def least(speeds=speeds, share=share, network=network):
        memory_bytes = tight_bytes(LONG, share)
        topology = cluster(speeds, devices=devices, memory_bytes=memory_bytes, network=network)
        return least_s(topology, 4, LONG, axes=PIPELINES)

    now_s = least() * ROUNDED
    assert least(speeds=[*speeds, 0.6]) <= now_s
    assert least(share=share * factor) <= now_s
    assert least(network=network * factor) <= now_s
    assert least(speeds=[1.0, *sorted(speeds)[1:]]) <= now_s  # the slowest host is healthy again


@pytest.mark.parametrize("hosts", [7, 13])
def test_awkward_numbers_of_hosts_are_all_used_with_quotas_that_differ_by_one(hosts):
    plan = search_plan(PROFILE, cluster([1.0] * hosts, devices=1, network=1e10), global_batch=256)
    assert plan.replicas == hosts
    assert plan.devices_spare == 0
    assert sum(plan.quotas) == plan.microbatches
    assert max(plan.quotas) - min(plan.quotas) <= 1


def test_509_of_512_devices_keep_almost_all_throughput():
    topology = cluster([1.0] * 64, devices=[8] * 63 + [5], network=1e10)
    whole = cluster([1.0] * 64, devices=8, network=1e10)
    plan, best = (search_plan(PROFILE, hosts, global_batch=81920) for hosts in (topology, whole))
    assert plan.devices_used >= 0.97 * 509
    assert (
        plan.step_time_s <= best.step_time_s * 512 / 509 * 1.15
    )  # 9 microbatches of 1 where 8 would do: 12.5 %


def test_a_slow_host_gets_a_quota_in_proportion():
    topology = cluster([1.0, 1.0, 1.0, 0.5], devices=1, network=1e10)
    plan = search_plan(
        PROFILE, topology, global_batch=700, axes={Axis.TENSOR: 1, Axis.FSDP: 1, Axis.PIPELINE: 1}
    )
    fast, slow = plan.quotas[0], plan.quotas[-1]
    assert plan.replicas == 4
    assert slow / fast == pytest.approx(0.5, abs=0.05)


def test_a_host_that_would_delay_the_step_is_a_spare():
    topology = cluster([1.0, 1.0, 1.0, 0.05], devices=1, network=1e10)
    plan = search_plan(PROFILE, topology, global_batch=6)
    assert [spare.first for spare in plan.spares] == ["host-03"]
    assert "left out as spares: host-03" in plan.reason


def test_the_stage_on_a_slow_host_has_fewer_layers():
    profile = small_profile(layers=12, vocabulary_tokens=4)
    topology = cluster([1.0, 1.0, 0.4], devices=1, network=1e12, latency_s=0)
    plan = search_plan(profile, topology, global_batch=60, axes={Axis.PIPELINE: 3})
    assert plan.replica_classes[0].layers == (5, 5, 2)


def test_a_tensor_group_with_a_slow_member_is_made_smaller_where_that_is_faster():
    """The search reproduces ResiHP's rule: with speeds 1, 1, 1, 0.4 it keeps two devices, not four."""
    topology = cluster([1.0, 1.0, 1.0, 0.4], devices=1, network=1e12, latency_s=0)
    chosen = search_plan(
        profile := small_profile(), topology, global_batch=64, axes={Axis.REPLICA: 1, Axis.FSDP: 1}
    )
    four = search_plan(profile, topology, global_batch=64, axes={Axis.TENSOR: 4})
    assert chosen.step_time_s < four.step_time_s


def test_the_terms_add_up_to_the_step_and_the_quotas_to_the_batch():
    plan = search_plan(PROFILE, cluster([1.0, 1.0, 0.6], devices=3), global_batch=60, axes={Axis.PIPELINE: 2})
    assert plan.step_time_s == pytest.approx(sum(plan.step_breakdown.by_term().values()))
    assert plan.step_breakdown.bubble_s > 0
    assert sum(plan.quotas) * plan.microbatch_sequences == 60
    assert len(plan.quotas) == plan.replicas
    used = sum(span.hosts * span.devices for span in plan.hosts)
    spare = sum(span.hosts * span.devices for span in plan.spares)
    assert used + spare == plan.device_count == 9
    assert used == plan.devices_used


def test_plans_are_ranked_and_have_reasons():
    plans = search_plans(PROFILE, cluster([1.0] * 4), global_batch=64, top=5)
    times = [plan.step_time_s for plan in plans]
    assert times == sorted(times)
    assert len({plan.layout.axes for plan in plans}) == 5
    assert f"next best is {plans[1].shape}" in plans[0].reason
    assert f"slower than {plans[0].shape}" in plans[1].reason


def test_a_search_returns_the_same_plan_after_hosts_were_lost_and_came_back():
    topology = cluster([1.0] * 5)
    again = topology.without("host-02").with_hosts([topology.host("host-02")])
    assert search_plan(PROFILE, topology, global_batch=60) == search_plan(PROFILE, again, global_batch=60)


def test_the_memory_and_devices_named_in_the_error_suffice():
    topology = cluster([1.0, 1.0], devices=1, memory_bytes=74_000_000)
    with pytest.raises(
        NoFeasiblePlan, match=r"found no plan for the 2 devices .* What would suffice: devices of"
    ) as caught:
        search_plan(PROFILE, topology, global_batch=12)
    memory, devices = caught.value.min_memory_bytes, caught.value.min_devices
    assert memory is not None
    assert devices is not None
    search_plan(PROFILE, cluster([1.0, 1.0], devices=1, memory_bytes=memory), global_batch=12)
    search_plan(PROFILE, cluster([1.0] * devices, devices=1, memory_bytes=74_000_000), global_batch=12)
    for less in (
        cluster([1.0, 1.0], devices=1, memory_bytes=memory - 100_000),
        cluster([1.0] * (devices - 1), devices=1, memory_bytes=74_000_000),
    ):
        with pytest.raises(NoFeasiblePlan):
            search_plan(PROFILE, less, global_batch=12)


@examples(few=5)
@given(st.integers(4, 8), st.sampled_from([1.0, 0.6, 0.3]), st.floats(0.3, 0.6))
@example(6, 0.6, 0.45)
def test_the_memory_and_devices_named_in_the_error_are_the_least(layers, speed, share):
    profile = small_profile(layers=layers, vocabulary_tokens=4, **PRIME)
    memory_bytes = tight_bytes(profile, share)
    with pytest.raises(NoFeasiblePlan) as caught:
        search_plan(
            profile, cluster([speed], devices=1, memory_bytes=memory_bytes, network=1e6), global_batch=1
        )
    memory, devices = caught.value.min_memory_bytes, caught.value.min_devices
    assert memory is not None
    for enough, does in ((memory, True), (memory - 2, False)):
        alone = cluster([speed], devices=1, memory_bytes=enough)
        assert math.isfinite(least_s(alone, 1, profile)) == does
    for hosts in range(1, layers + 1):
        several = cluster([1.0] * hosts, devices=1, memory_bytes=memory_bytes, network=1e6)
        assert math.isfinite(least_s(several, 1, profile)) == (devices is not None and hosts >= devices)


def test_a_plan_with_two_replicas_continues_in_place_when_one_is_lost():
    """The fastest plan has a single replica over all devices, so its state would be lost with any of them."""
    topology = cluster([1.0] * 4, devices=1, memory_bytes=75_500_000, network=1e10, latency_s=0.0)
    alone = search_plan(PROFILE, topology, global_batch=12, axes={Axis.REPLICA: 1})
    plan = search_plan(PROFILE, topology, global_batch=12, min_replicas=2)
    assert alone.replicas == 1
    assert plan.replicas >= 2
    assert "of all plans with 2 replicas or more" in plan.reason


def test_the_error_names_the_most_replicas_that_fit():
    """A replica needs two of these devices; each remedy that the message names suffices."""
    topology = cluster([1.0] * 4, devices=1, memory_bytes=74_600_000)
    with pytest.raises(
        NoFeasiblePlan,
        match=r"with at least 4 replicas. What would suffice: requesting \d replicas? or fewer or devices of",
    ) as caught:
        search_plan(PROFILE, topology, global_batch=12, min_replicas=4)
    most, memory, devices = (
        caught.value.max_replicas,
        caught.value.min_memory_bytes,
        caught.value.min_devices,
    )
    assert most is not None
    assert memory is not None
    assert devices is not None
    assert search_plan(PROFILE, topology, global_batch=12, min_replicas=most).replicas >= most
    for enough in (
        cluster([1.0] * 4, devices=1, memory_bytes=memory),
        cluster([1.0] * devices, devices=1, memory_bytes=74_600_000),
    ):
        assert search_plan(PROFILE, enough, global_batch=12, min_replicas=4).replicas >= 4
    with pytest.raises(NoFeasiblePlan):
        search_plan(PROFILE, topology, global_batch=12, min_replicas=most + 1)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"min_replicas": 0}, "min_replicas: found 0, expected 1 or more"),
        ({"min_replicas": 9}, "min_replicas: found 9, expected at most 8"),
        ({"min_replicas": 5, "axes": {Axis.TENSOR: 2}}, "min_replicas: found 5, expected at most 4"),
        ({"min_replicas": 4, "axes": {Axis.FSDP: 4}}, "min_replicas: found 4, expected at most 2"),
        ({"min_replicas": 3, "axes": {Axis.REPLICA: 2}}, "min_replicas: found 3, expected at most the 2 of"),
        ({"global_batch": 0}, "global_batch: found 0, expected 1 or more"),
        ({"pipeline_repeats": 0}, "pipeline_repeats: found 0"),
        (
            {"axes": {Axis.TENSOR: 3}},
            "axis tensor: found 3, expected a size that small allows; it has heads = 4",
        ),
        ({"axes": {Axis.TENSOR: -2}}, "axis tensor: found -2, expected 1 or more"),
        ({"axes": {Axis.EXPERT: 2}}, "axis expert: found 2"),
        ({"axes": {Axis.PIPELINE: 4}}, "axis pipeline: found 4, .* layers = 3"),
        ({"axes": {Axis.FSDP: 5}}, "axis fsdp: found 5, expected a divisor of the global batch of 12"),
        ({"axes": {Axis.REPLICA: 13}}, "global_batch: found 12, expected at least 13"),
        (
            {"axes": {Axis.TENSOR: 4, Axis.FSDP: 4}},
            "axes: found sizes that take 16 devices, expected at most the 8",
        ),
    ],
)
def test_a_request_that_no_plan_can_satisfy_is_refused(wish, message):
    with pytest.raises(PlanError, match=message):
        search_plan(PROFILE, cluster([1.0] * 4), **{"global_batch": 12, **wish})


def test_a_number_format_without_a_peak_is_refused():
    with pytest.raises(TopologyError, match="found no peak for 'fp8'"):
        search_plan(PROFILE, cluster([1.0] * 2), global_batch=12, number_format="fp8")


def test_a_program_that_no_axis_can_shard_is_refused():
    prime = small_profile(
        layers=1,
        width=101,
        heads=1,
        kv_heads=1,
        head_dim=103,
        feed_forward=107,
        vocabulary_tokens=109,
        sequence_tokens=113,
    )
    with pytest.raises(CallerError, match="found dims that divide by nothing from 2 to 8"):
        search_plan(prime, cluster([1.0] * 4), global_batch=12)


def test_of_equally_fast_replicas_those_without_a_slow_host_are_used():
    """A slow host with fewer layers does not delay the microbatches, but the update."""
    topology = cluster([1.0, 1.0, 0.6, 1.0], inner=1e8, network=1e7, latency_s=0.0, memory_bytes=74_000_000)
    assert least_s(topology, 1) == pytest.approx(find_least_step_s(PROFILE, topology, 1), rel=1e-9)


@pytest.mark.parametrize("axes", [{Axis.PIPELINE: 3}, {Axis.FSDP: 4}, {Axis.TENSOR: 4}, {}])
def test_a_plan_that_just_fits_is_found(axes):
    plan = search_plan(PROFILE, cluster([1.0] * 4), global_batch=12, axes=axes)
    enough = int(plan.memory.total / plan.request.calibration.usable_memory) + 1
    tight = search_plan(PROFILE, cluster([1.0] * 4, memory_bytes=enough), global_batch=12, axes=axes)
    assert tight.step_time_s == plan.step_time_s


def test_a_block_of_replicas_is_as_fast_as_its_slowest():
    topology = cluster(
        [1.0, 1.0, 0.3, 1.0, 1.0, 1.0],
        devices=1,
        network=1e8,
        per_rack=3,
        oversubscription=50.0,
        latency_s=0.0,
    )
    plan = search_plan(PROFILE, topology, global_batch=6)
    assert plan.step_time_s == pytest.approx(find_least_step_s(PROFILE, topology, 6), rel=1e-9)
    blocked = make_layout(ReplicaAxes(), devices=1, level=1, block=3, outermost=2)
    pool = plan.request.pool
    blocks = pool.count_blocks(blocked)
    assert sorted(pool.kinds[kind].speed for composition, _ in blocks for kind, _ in composition) == [
        0.3,
        1.0,
    ]


@pytest.mark.parametrize("axes", [{"pipeline": 2, "fsdp": 1}, {"pipeline": 3, "tensor": 2}])
def test_given_stages_that_do_not_fit_are_no_plan_on_any_number_of_hosts(axes):
    topology = cluster([1.0] * 6, devices=1, memory_bytes=tight_bytes(DEEP, 0.01))
    with pytest.raises(NoFeasiblePlan):
        search_plan(DEEP, topology, global_batch=8, axes=axes)
