"""Whether a trainer's hosts may have axes of their own, and what a plan says where they may not."""

import dataclasses
import itertools
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.errors import CallerError, TooFewHosts
from resilient_jax.ids import HostName
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.protocol.plan_records import PlanOutlook
from resilient_jax.protocol.recovery_records import MAX_FORESEEN_HOSTS
from resilient_jax.topology import NumberFormat, Peak
from resilient_jax.trainer import arrangement, plan_forecast, speculative_compilation
from resilient_jax.trainer.arrangement import PlanSearcher, estimate_step_s, list_plan_axes
from resilient_jax.trainer.plan_forecast import PlanForecast, list_likely_groups
from resilient_jax.trainer.planner import allows_axes_by_host
from tests.support.plan_topologies import cluster, small_profile, tight_bytes

PROFILE = small_profile()
MUON = "the update computes dot_general of [8, 8] from .w"


def hosts_with(devices, **options):
    return cluster([1.0] * len(devices), devices=devices, inner=1e10, network=1e9, **options)


def make_searcher(topology, *, evaluation_size=None, why_mesh_bound="", **options):
    config: Any = SimpleNamespace(
        planner=rj.Planner(topology=topology, program_cost=PROFILE, **options),
        microbatch_size=12,
        recipe=SimpleNamespace(num_microbatches=24),
        global_batch=12 * 24,
        num_shared_examples=math.gcd(12, evaluation_size or 12),
    )
    searcher = PlanSearcher(config)
    searcher.forbid_axes_by_host(why_mesh_bound)
    return searcher


def find_plan(topology, **options):
    searcher = make_searcher(topology, **options)
    return searcher.find_plan(searcher.all_hosts)


@pytest.mark.parametrize(
    ("asked", "devices", "platform", "expected"),
    [
        (None, [4, 4], "cpu", False),
        (None, [4, 3], "cpu", True),
        (None, [4, 3], "gpu", False),
        (True, [4, 4], "gpu", True),
        (False, [4, 3], "cpu", False),
    ],
)
def test_hosts_may_differ_in_axes_where_asked_or_unequal_by_the_topology_on_cpu(
    asked, devices, platform, expected
):
    planner = rj.Planner(topology="unread", axes_by_host=asked)
    assert allows_axes_by_host(planner, hosts_with(devices), platform) is expected


def test_unequal_hosts_of_a_topology_have_axes_of_their_own_and_equal_axes_if_so_asked():
    assert isinstance(find_plan(hosts_with([4, 3])), UnequalPlan)
    plan = find_plan(hosts_with([4, 3]), axes_by_host=False)
    assert not isinstance(plan, UnequalPlan)
    assert "All hosts have the same axes: axes_by_host is off." in plan.reason


def test_hosts_that_are_equal_by_the_topology_keep_equal_axes_when_one_loses_a_device():
    topology = hosts_with([4, 4])
    plans = []
    for asked in (None, True):
        searcher = make_searcher(topology, axes_by_host=asked)
        searcher.note_devices(make_world(topology, [4, 3]))
        plans.append(searcher.find_plan(searcher.all_hosts))
    assert [isinstance(plan, UnequalPlan) for plan in plans] == [False, True]


def make_world(topology, counts) -> Any:
    devices = [SimpleNamespace(process_index=host) for host, count in enumerate(counts) for _ in range(count)]
    hosts = tuple(host.name for host in topology.hosts)
    return SimpleNamespace(hosts=hosts, host=hosts[0], devices=devices)


def test_where_no_equal_axes_fit_and_others_are_not_allowed_the_error_says_why_and_what_to_change():
    topology = hosts_with([8, 7], memory_bytes=tight_bytes(PROFILE, 3))
    with pytest.raises(PlanError) as refused:
        find_plan(topology, axis_sizes={"fsdp": 8})
    assert "axes_by_host" not in str(refused.value)
    with pytest.raises(
        PlanError, match=rf"same axes: {MUON}.*Another optimizer".replace("[8, 8]", r"\[8, 8\]")
    ):
        find_plan(topology, axis_sizes={"fsdp": 8}, why_mesh_bound=MUON)
    with pytest.raises(PlanError, match=r"axes_by_host is off.*axes_by_host=True"):
        find_plan(topology, axis_sizes={"fsdp": 8}, axes_by_host=False)


def test_a_plan_divides_the_microbatches_of_an_evaluation():
    plan = find_plan(hosts_with([4, 3]), evaluation_size=8)
    plans = [team.plan for team in plan.teams] if isinstance(plan, UnequalPlan) else [plan]
    assert all(8 % one.layout.axes.fsdp == 0 for one in plans)
    plan = find_plan(hosts_with([4, 3]))
    assert isinstance(plan, UnequalPlan)
    assert [team.plan.layout.axes.fsdp for team in plan.teams][-1] == 3


def test_replicas_span_hosts_where_none_inside_of_a_host_fits_or_where_asked():
    tight, ample = (hosts_with([2] * 4, memory_bytes=tight_bytes(PROFILE, part)) for part in (0.9, 10))
    for topology, asked, expected in ((tight, None, True), (ample, None, False), (ample, True, True)):
        searcher = make_searcher(topology, spans_hosts=asked)
        assert searcher.spans_hosts is expected
        plan = searcher.find_plan(searcher.all_hosts)
        assert isinstance(plan, Plan)
        assert (plan.layout.axes_in_host.devices == 2) or not expected
        if expected:
            assert not searcher.allows_axes_by_host
    assert make_searcher(ample, axis_sizes={"fsdp": 4}).spans_hosts, "these are more than a host has"
    with pytest.raises(NoFeasiblePlan):
        find_plan(tight, spans_hosts=False)
    # What is wrong for another reason is not put on more hosts.
    with pytest.raises(PlanError, match="axis fsdp: found 5"):
        find_plan(ample, axis_sizes={"fsdp": 5})


def test_a_job_whose_hosts_are_too_few_for_any_plan_waits_for_as_many_as_one_needs():
    topology = hosts_with([2] * 4, memory_bytes=tight_bytes(PROFILE, 0.9))
    searcher = make_searcher(topology)
    with pytest.raises(TooFewHosts, match="2 hosts of it suffice") as few:
        searcher.find_plan_or_wait(searcher.all_hosts[-1:])
    assert few.value.needed == 2
    nowhere = make_searcher(hosts_with([2] * 4, memory_bytes=tight_bytes(PROFILE, 0.1)))
    with pytest.raises(NoFeasiblePlan):
        nowhere.find_plan_or_wait(nowhere.all_hosts[:2])


def test_the_arrangement_of_a_plan_of_whole_hosts_is_that_of_given_axes():
    topology = hosts_with([2] * 4, memory_bytes=tight_bytes(PROFILE, 0.9))
    searcher = make_searcher(topology, axis_sizes={"fsdp": 4})
    plan = searcher.find_plan(searcher.all_hosts)
    assert isinstance(plan, Plan)
    searcher._specs[4, 1, 1] = ()
    variables: Any = None
    found = searcher.make_arrangement(plan, [], variables)
    assert found.spans_hosts
    assert not found.is_sharded_on_host
    assert found.replica_shape == rj.ReplicaShape(hosts=2, axes=(("fsdp", 4), ("expert", 1), ("tensor", 1)))
    mesh = found.placement.mesh
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 4, "expert": 1, "tensor": 1}
    axes = list_plan_axes(plan)
    for hosts, replicas in ((searcher.all_hosts[:3], 1), (searcher.all_hosts[:2], 1)):
        kept = searcher.find_plan_with_axes(hosts, axes)
        assert isinstance(kept, Plan)
        assert (kept.replicas, kept.layout.axes) == (replicas, plan.layout.axes)
    assert searcher.find_plan_with_axes(searcher.all_hosts[:1], axes) is None


@pytest.mark.parametrize(
    ("by_host", "parallelism"),
    [(True, rj.Parallelism()), (None, rj.Parallelism(pipeline=rj.Pipeline(num_stages=2)))],
)
def test_replicas_over_hosts_have_no_pipeline_and_no_axes_of_a_host(by_host, parallelism):
    planner = rj.Planner(topology=hosts_with([2] * 4), spans_hosts=True, axes_by_host=by_host)
    with pytest.raises(CallerError, match="spans_hosts=True with a pipeline or axes_by_host=True"):
        rj.Trainer(
            model=lambda key: {"w": jnp.zeros((8, 8))},
            optimizer=optax.adam(0.1),
            loss_fn=lambda params, batch: jnp.mean(batch @ params["w"]),
            data=lambda step, index: np.zeros((4, 8), np.float32),
            batch_size=8,
            microbatch_size=4,
            planner=planner,
            parallelism=parallelism,
        )


SLOW = (("matrix_efficiency", 0.01),)


def test_plans_are_searched_by_the_constants_of_the_generation():
    searcher = make_searcher(hosts_with([2] * 4))
    hosts = searcher.all_hosts
    given = searcher.find_plan(hosts)
    searcher.calibrate(SLOW)
    slow = searcher.find_plan(hosts)
    assert slow.step_time_s > 10 * given.step_time_s
    assert estimate_step_s(searcher, hosts, slow) == pytest.approx(slow.step_time_s)
    searcher.calibrate(())
    assert searcher.find_plan(hosts) == given


def test_a_search_that_ends_after_new_constants_came_is_not_taken_for_one_by_these(monkeypatch):
    searcher = make_searcher(hosts_with([2] * 4))
    search = arrangement.search_best

    def search_while_a_generation_begins(*arguments):
        found = search(*arguments)
        searcher.calibrate(SLOW)
        return found

    monkeypatch.setattr(arrangement, "search_best", search_while_a_generation_begins)
    early = searcher.find_plan(searcher.all_hosts)
    monkeypatch.undo()
    assert searcher.find_plan(searcher.all_hosts).step_time_s > 10 * early.step_time_s


def make_forecast(
    topology, *, is_ready=False, num_hosts: int | None = None, place: int = 0
) -> tuple[PlanForecast, list[PlanOutlook]]:
    """Return the forecast of a generation of all hosts, or the first ones, and what the host at a place reports."""
    reported: list[PlanOutlook] = []
    searcher = make_searcher(topology)
    hosts = searcher.all_hosts[:num_hosts]
    world: Any = SimpleNamespace(
        hosts=hosts,
        host=hosts[place],
        generation=3,
        step_services=SimpleNamespace(report_plans=reported.append),
    )
    return PlanForecast(searcher, world, searcher.find_plan(hosts), lambda _: is_ready), reported


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_a_loss_makes_of_the_axes_is_reported_with_the_times_of_compilation(is_ready):
    topology = hosts_with([2] * 8)
    forecast, reported = make_forecast(topology, is_ready=is_ready)
    forecast.report(20.0)
    assert reported == [], "nothing is estimated yet"
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    forecast.report(0.0)
    searcher = make_searcher(topology)
    hosts = searcher.all_hosts
    now = searcher.find_plan(hosts)
    assert isinstance(now, Plan)
    assert (reported[0].groups, reported[0].axes) == ((hosts,), list_plan_axes(now))
    assert [loss.groups for loss in reported[0].losses] == [(0,) * number for number in range(8)]
    for loss, again in zip(reported[0].losses, reported[1].losses, strict=True):
        best = searcher.find_plan(hosts[: len(hosts) - len(loss.groups)])
        assert isinstance(best, Plan)
        assert (loss.best_axes, loss.prepare_s) == (list_plan_axes(best), 0.0 if is_ready else 20.0)
        # Also where the first step found its programs in a cache: what is not ready takes time.
        assert (again.prepare_s == 0) is is_ready
        assert loss.best == pytest.approx(now.step_time_s / best.step_time_s)
        assert 0 < loss.kept <= loss.best


@pytest.mark.parametrize("is_ready", [False, True])
def test_all_wait_for_shards_that_are_cut_anew_where_replicas_span_hosts(is_ready):
    topology = hosts_with([2] * 4, memory_bytes=tight_bytes(PROFILE, 0.9))
    forecast, reported = make_forecast(topology, is_ready=is_ready, num_hosts=4)
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    axes, moved = reported[0].axes, 0
    for loss in reported[0].losses:
        assert loss.prepare_s == (0.0 if is_ready else 20.0)
        assert (loss.move_s > 1e-4) is (loss.best_axes != axes)
        moved += loss.best_axes != axes
    assert moved


@pytest.mark.parametrize(("place", "reports"), [(8, True), (9, False)])
def test_one_host_more_reports_than_may_be_lost_at_once(place, reports):
    forecast, reported = make_forecast(hosts_with([2] * 10), place=place)
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    assert bool(reported) is reports
    if reports:
        assert max(len(loss.groups) for loss in reported[0].losses) == MAX_FORESEEN_HOSTS


@pytest.mark.parametrize(("place", "reports"), [(0, True), (9, False), (12, True), (13, False)])
def test_the_loss_of_a_rack_is_estimated_also_by_a_host_outside(place, reports):
    topology = cluster([1.0] * 24, devices=2, per_rack=12, inner=1e10, network=1e9)
    forecast, reported = make_forecast(topology, place=place)
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    assert bool(reported) is reports
    if reports:
        searcher = make_searcher(topology)
        (rack,) = [loss for loss in reported[0].losses if len(loss.groups) == 12]
        assert rack.best_axes == list_plan_axes(searcher.find_plan(searcher.all_hosts[:12]))
        assert [len(loss.groups) for loss in reported[0].losses] == [*range(MAX_FORESEEN_HOSTS + 1), 12]


def test_losses_of_several_hosts_are_estimated_by_the_groups_that_lose_one():
    topology = hosts_with([4] * 4)
    for host in topology.hosts[2:]:
        topology = topology.slowed(host.name, 0.6)
    forecast, reported = make_forecast(topology)
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    searcher = make_searcher(topology)
    now = searcher.find_plan(searcher.all_hosts)
    assert isinstance(now, Plan)
    found = {loss.groups: loss for loss in reported[0].losses}
    places = {host: index for index, group in enumerate(reported[0].groups) for host in group}
    for num_lost in (1, 2, 3):
        for lost in itertools.combinations(searcher.all_hosts, num_lost):
            left = tuple(host for host in searcher.all_hosts if host not in lost)
            best = searcher.find_plan(left)
            assert isinstance(best, Plan)
            loss = found[tuple(sorted(places[host] for host in lost))]
            assert loss.best == pytest.approx(now.step_time_s / best.step_time_s), "whichever of the groups"
    assert found[()].best == pytest.approx(1.0)
    assert len({loss.best for loss in found.values()}) == len(found) == 8


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_a_join_makes_of_the_axes_is_estimated_for_the_hosts_that_are_absent(is_ready):
    topology = hosts_with([2] * 8)
    forecast, reported = make_forecast(topology, num_hosts=5, is_ready=is_ready)
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    searcher = make_searcher(topology)
    hosts = searcher.all_hosts
    now = searcher.find_plan(hosts[:5])
    assert isinstance(now, Plan)
    assert (reported[0].groups, reported[0].absent) == ((hosts[:5],), (hosts[5:],))
    assert [join.groups for join in reported[0].joins] == [(0,), (0, 0), (0, 0, 0)]
    for join in reported[0].joins:
        best = searcher.find_plan(hosts[: 5 + len(join.groups)])
        assert isinstance(best, Plan)
        assert (join.best_axes, join.prepare_s) == (list_plan_axes(best), 0.0 if is_ready else 20.0)
        assert join.best == pytest.approx(now.step_time_s / best.step_time_s)
        assert 0 < join.kept <= join.best


def test_a_host_that_joins_compiles_for_the_axes_that_the_others_have_where_they_may_be_kept(monkeypatch):
    searcher = make_searcher(hosts_with([2] * 4))
    hosts = searcher.all_hosts
    compiled: list[Any] = []
    monkeypatch.setattr(
        speculative_compilation, "compile_step", lambda _, then, *__: compiled.append(then.replica_shape)
    )
    placement = SimpleNamespace(with_abstract_mesh=lambda: "of two devices")

    def arrange(plan, *_) -> Any:
        return SimpleNamespace(
            replica_shape=list_plan_axes(plan), placement=placement, plan=plan, spans_hosts=False
        )

    monkeypatch.setattr(searcher, "make_arrangement", arrange)
    programs: Any = SimpleNamespace(
        abstract_state=SimpleNamespace(variables=SimpleNamespace(params=None)), abstract_sums=None
    )
    config: Any = SimpleNamespace(
        planner=rj.Planner(topology="unread"),
        recipe=SimpleNamespace(num_microbatches=24),
        parallelism=SimpleNamespace(reduction="exact"),
    )
    compiler = speculative_compilation.SpeculativeCompiler(searcher, config, programs, None)
    best = searcher.find_plan(hosts)
    present = searcher.find_plan(hosts[:-1])
    assert isinstance(best, Plan)
    assert isinstance(present, Plan)
    for decided in ((), *(((0, (("fsdp", fsdp), ("expert", 1), ("tensor", 1))),) for fsdp in (1, 2))):
        axes = decided or list_plan_axes(present)
        kept = searcher.find_plan_with_axes(hosts, axes)
        assert kept is not None
        slower = 1 - best.step_time_s / kept.step_time_s
        for gain_s in (599.0, 601.0):
            compiled.clear()
            services = SimpleNamespace(plan_axes=decided, next_failure_s=gain_s / slower if slower else 1e9)
            world: Any = SimpleNamespace(
                hosts=hosts, host=hosts[-1], local_devices=[], step_services=services
            )
            compiler.prepare_join(world, arrange(best))
            is_needed = axes != list_plan_axes(best) and gain_s < speculative_compilation.MAX_COMPILE_S
            assert compiled == ([axes] if is_needed else [])


def test_the_estimates_are_bounded_and_the_likeliest_losses_come_first(monkeypatch):
    sizes = [1, 5, 2, 1]
    losses = list_likely_groups(sizes, 3, 99)
    hosts = [index for index, size in enumerate(sizes) for _ in range(size)]
    counts = Counter(
        tuple(sorted(lost)) for number in (1, 2, 3) for lost in itertools.combinations(hosts, number)
    )
    assert set(losses) == set(counts)
    assert losses == sorted(losses, key=lambda loss: (len(loss), -counts[loss]))
    assert list_likely_groups([1, 1], 8, 99) == [(0,), (1,), (0, 1)]
    assert list_likely_groups([9], 8, 99) == [(0,) * number for number in range(1, 9)]
    assert list_likely_groups(sizes, 8, 7) == list_likely_groups(sizes, 2, 7)
    assert len(list_likely_groups([9] * 200, 8, 32)) == 32
    monkeypatch.setattr(plan_forecast, "MAX_CHANGES", 1)
    forecast, reported = make_forecast(hosts_with([4] * 3))
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    assert [loss.groups for loss in reported[0].losses] == [(), (0,)]


def test_what_changes_make_of_axes_by_host_is_reported_by_the_number_of_devices():
    topology = hosts_with([4, 4, 3, 4])
    forecast, reported = make_forecast(topology, num_hosts=3)
    forecast.estimate(lambda: None)
    forecast.report(20.0)
    searcher = make_searcher(topology)
    hosts = searcher.all_hosts
    now = searcher.find_plan(hosts[:3])
    assert isinstance(now, UnequalPlan)
    (outlook,) = reported
    assert outlook.axes == list_plan_axes(now)
    assert [number for number, _ in outlook.axes] == [3, 4]
    assert (outlook.groups, outlook.absent) == ((hosts[:2], hosts[2:3]), (hosts[3:], ()))
    left = {(0,): hosts[1:3], (1,): hosts[:2], (): hosts[:3], (0, 0): hosts[2:3], (0, 1): hosts[1:2]}
    for change, then in ((one, left[one.groups]) for one in outlook.losses):
        best = searcher.find_plan(then)
        kept = searcher.find_plan_with_axes(then, outlook.axes)
        assert kept is not None
        assert (change.best_axes, change.best) == (list_plan_axes(best), now.step_time_s / best.step_time_s)
        assert change.kept == pytest.approx(now.step_time_s / kept.step_time_s)
    assert {one.groups for one in outlook.losses} == set(left)
    (join,) = outlook.joins
    assert (join.groups, join.best_axes) == ((0,), list_plan_axes(searcher.find_plan(hosts)))


def test_a_plan_of_unequal_hosts_has_the_axes_that_the_leader_chose():
    searcher = make_searcher(hosts_with([4, 4, 3]))
    best = searcher.find_plan(searcher.all_hosts)
    assert isinstance(best, UnequalPlan)
    found = searcher.find_plan_with_axes(searcher.all_hosts, list_plan_axes(best))
    assert isinstance(found, UnequalPlan)
    assert (found.teams, found.step_time_s) == (best.teams, best.step_time_s)
    fours, threes = ((number, (("fsdp", number), ("expert", 1), ("tensor", 1))) for number in (4, 3))
    other = searcher.find_plan_with_axes(searcher.all_hosts, (threes, fours))
    assert isinstance(other, UnequalPlan)
    assert list_plan_axes(other) == (threes, fours)
    assert searcher.find_plan_with_axes(searcher.all_hosts, (fours,)) is None, (
        "of three devices nothing is said"
    )
    alone = searcher.find_plan_with_axes(searcher.all_hosts[:2], (threes, fours))
    assert isinstance(alone, Plan)
    assert list_plan_axes(alone) == ((0, fours[1]),)


def test_hosts_with_fewer_devices_than_the_topology_gives_them_are_reported():
    searcher = make_searcher(hosts_with([4] * 3))
    searcher._found = dict(zip(searcher.all_hosts, (4, 2, 4), strict=True))
    assert searcher.list_incomplete() == searcher.all_hosts[1:2]


def test_hosts_whose_loss_leaves_other_devices_are_other_groups():
    searcher = make_searcher(hosts_with([4, 4, 2]), axes_by_host=False)
    assert [len(hosts) for hosts in searcher.group_alike(searcher.all_hosts)] == [2, 1]


def test_a_plan_has_the_axes_that_the_leader_chose_and_none_where_they_do_not_fit():
    searcher = make_searcher(hosts_with([4] * 3))
    best = searcher.find_plan(searcher.all_hosts)
    assert isinstance(best, Plan)
    for fsdp in (1, 2, 4):
        axes = ((0, (("fsdp", fsdp), ("expert", 1), ("tensor", 1))),)
        plan = searcher.find_plan_with_axes(searcher.all_hosts, axes)
        assert plan is not None
        assert list_plan_axes(plan) == axes
        assert plan.step_time_s >= best.step_time_s
    assert searcher.find_plan_with_axes(searcher.all_hosts, ((0, (("fsdp", 8),)),)) is None


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) - batch) ** 2)


def test_an_update_has_the_same_bits_whether_hosts_may_differ_in_axes_or_not():
    topology = hosts_with([jax.local_device_count()])
    (host,) = topology.hosts
    peaks = (Peak(number_format=NumberFormat.FP32, flops_per_s=1e10),)
    accelerator = dataclasses.replace(host.accelerator, peaks=peaks)
    host = dataclasses.replace(host, name=HostName("localhost"), accelerator=accelerator)
    topology = dataclasses.replace(topology, hosts=(host,))

    def train(axes_by_host):
        return (
            rj.Trainer(
                model=lambda key: {"w": jax.random.normal(key, (24, 24)) / 5},
                optimizer=optax.chain(optax.clip_by_global_norm(0.01), optax.adam(0.01)),
                loss_fn=loss,
                data=lambda step, index: (
                    np.random.default_rng((step, index)).normal(size=(2, 24)).astype(np.float32)
                ),
                batch_size=4,
                microbatch_size=2,
                planner=rj.Planner(topology=topology, axes_by_host=axes_by_host),
            )
            .fit(4)
            .params_sha256
        )

    assert train(None) == train(False) == train(True)
