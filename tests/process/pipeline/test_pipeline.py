"""The promise of the pipeline: the bits of all weights depend on no cut, route, order or host, nor on who dies when."""

import itertools

import msgspec
import pytest

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.makespan import share_tasks
from resilient_jax.pipeline_schedule.routes import Hop, make_routes
from resilient_jax.pipeline_schedule.tasks import Task, TaskKind
from tests.process.pipeline.pipeline_hosts import Pipeline, PipelineHost, make_forge
from tests.support.full_only import full_but
from tests.support.small_decoders import ROWS, TOKENS, WIDTH

BLOCKS, MICROBATCHES, STEPS = 5, 4, 3
NAMES = ("a", "b", "c", "d")
EVALUATED = 10
"""Microbatches of an evaluation: more than a stage may send ahead."""
HIDDEN_BYTES = 4 * ROWS * TOKENS * WIDTH
LAYER_BYTES = 4 * WIDTH * 5 * WIDTH
LAYOUTS = {
    "two stages": ([[("a", 2), ("b", 3)]], [4], {}),
    "two stages, backward passes whole": ([[("a", 2), ("b", 3)]], [4], {"schedule": "whole_backward"}),
    "three unequal stages": ([[("a", 1), ("b", 3), ("c", 1)]], [4], {}),
    "two replicas, cut differently, with unequal quotas": (
        [[("a", 2), ("b", 3)], [("c", 4), ("d", 1)]],
        [3, 1],
        {},
    ),
    "a replica on three hosts and one on a single host": (
        [[("a", 1), ("b", 2), ("c", 2)], [("d", 5)]],
        [2, 2],
        {"schedule": "gradient_first"},
    ),
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    forge = make_forge(tmp_path_factory.mktemp("compiled"))
    started = [PipelineHost(name, forge) for name in NAMES]
    try:
        for host in started:
            host.meet(BLOCKS)
        yield started
    finally:
        for host in started:
            host.end()
        forge.end()


@pytest.fixture(scope="module")
def undisturbed(hosts):
    """What each step gives on a single host."""
    alone = Pipeline(hosts, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    found = [alone.step() for _ in range(STEPS)]
    assert len({str(digests) for digests in found}) == STEPS
    return found


@pytest.mark.parametrize("layout", full_but(LAYOUTS, lambda layout: layout == "three unequal stages"))
def test_weights_after_each_step_are_those_of_one_host_in_every_bit(hosts, undisturbed, layout):
    teams, quotas, config = LAYOUTS[layout]
    pipeline = Pipeline(hosts, teams, quotas, max_norm=0.5, **config)
    assert [pipeline.step() for _ in range(STEPS)] == undisturbed


def name_teams(teams):
    return [[(HostName(host), blocks) for host, blocks in team] for team in teams]


def evaluate(pipeline, routes):
    """Return the sums of an evaluation, after a check that all hosts have them, and the bytes that came to each."""
    answers = pipeline.evaluate(routes)
    sums = [found["sums"] for found in answers.values()]
    assert all(one == sums[0] for one in sums)
    return sums[0], {host.name: found["received"] for host, found in answers.items()}


@pytest.fixture(scope="module")
def evaluated(hosts):
    """The sums of an evaluation on a single host, by name, as the bits of float32."""
    alone = Pipeline(hosts, [[("a", BLOCKS)]], [MICROBATCHES])
    found, _ = evaluate(alone, make_routes(name_teams([[("a", BLOCKS)]]), [EVALUATED]))
    assert sorted(found) == ["accuracy", "loss", "spread"]
    return found


@pytest.mark.parametrize("layout", full_but(LAYOUTS, lambda layout: layout == "three unequal stages"))
def test_an_evaluation_has_the_bits_of_one_host_and_sends_no_weights(hosts, evaluated, layout):
    teams, quotas, config = LAYOUTS[layout]
    pipeline = Pipeline(hosts, teams, quotas, **config)
    shares = share_tasks(EVALUATED, quotas)
    found, received = evaluate(pipeline, make_routes(name_teams(teams), shares))
    assert found == evaluated
    for team, share in zip(teams, shares, strict=True):
        for stage, (host, _) in enumerate(team):
            # The hidden state of each microbatch comes to each stage but the first, and nothing as large as a layer.
            assert received[host].pop("evaluated", 0) == (HIDDEN_BYTES * share if stage else 0)
            assert received[host].keys() <= {"taken", "results"}
            assert sum(received[host].values()) < LAYER_BYTES


REPLICAS = [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]]
FAULTS = {
    "forward": Task(TaskKind.FORWARD, 1, Hop(HostName("b"), 2, 5)),
    "input gradient, on the first stage": Task(TaskKind.INPUT_GRADIENT, 0, Hop(HostName("a"), 0, 2)),
    "weight gradient": Task(TaskKind.WEIGHT_GRADIENT, 1, Hop(HostName("b"), 2, 5)),
}


@pytest.fixture
def breakable(hosts):
    """The hosts; one that a test kills is replaced after it."""
    yield hosts
    for number, host in enumerate(hosts):
        if host.is_dead:
            host.end()
            hosts[number] = PipelineHost(host.name, host.forge)
            hosts[number].meet(BLOCKS)


@pytest.fixture
def replicas(breakable, undisturbed):
    """Two replicas that have made an undisturbed step."""

    def start(teams=REPLICAS, **config):
        if "wait_timeout_s" in config:
            # With a short wait no host may have programs to load.
            assert Pipeline(breakable, teams, [2, 2], max_norm=0.5).step() == undisturbed[0]
        pipeline = Pipeline(breakable, teams, [2, 2], max_norm=0.5, **config)
        assert pipeline.step() == undisturbed[0]
        return pipeline

    return start


def go_on(pipeline, undisturbed):
    """Finish the step in which a host died, and the next one."""
    assert pipeline.recover() == 1
    ran = pipeline.resume()
    assert pipeline.commit() == undisturbed[1]
    pipeline.reroute()
    assert pipeline.step() == undisturbed[2]
    return ran


@pytest.mark.parametrize("fault", full_but(FAULTS, lambda fault: fault != "weight gradient"))
def test_a_host_that_dies_before_a_task_changes_no_bit_of_the_step(replicas, undisturbed, fault):
    pipeline = replicas()
    found = pipeline.run(die_before=FAULTS[fault])
    assert [host.name for host, one in found.items() if one.get("died")] == [FAULTS[fault].hop.host]
    every_task = 3 * sum(len(route.hops) for route in pipeline.routes)
    assert go_on(pipeline, undisturbed) < every_task, "what survivors had done is not done again"


@pytest.mark.parametrize(
    ("fault", "axis"),
    full_but(
        itertools.product(FAULTS, ("", "fsdp", "tensor")),
        [("forward", "")].__contains__,
    ),
)
def test_what_is_done_of_a_step_outlives_the_devices_that_it_was_done_on(breakable, fault, axis):
    alone = Pipeline(breakable, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5, axis=axis)
    expected = [alone.step() for _ in range(STEPS)]
    pipeline = Pipeline(breakable, REPLICAS, [2, 2], max_norm=0.5, axis=axis)
    assert pipeline.step() == expected[0]
    pipeline.run(die_before=FAULTS[fault])
    done = pipeline.count_done()
    assert sum(done.values()) > 0
    pipeline.leave_world()
    assert pipeline.recover() == 1
    assert pipeline.count_done() == done
    pipeline.resume()
    assert pipeline.commit() == expected[1]
    pipeline.reroute()
    assert pipeline.step() == expected[2]


def test_an_evaluation_is_made_again_after_a_death_and_the_step_has_its_bits(replicas, undisturbed):
    pipeline = replicas()
    routes = make_routes(name_teams(REPLICAS), [5, 5])
    expected, _ = evaluate(pipeline, routes)
    assert pipeline.recover() == 1  # a generation has one evaluation of a state
    found = pipeline.evaluate(routes, ("a", 3))
    outcomes = {host.name: one.get("error", "died") for host, one in found.items()}
    assert outcomes == {"a": "died", "b": "PeerUnreachable", "c": "PeerUnreachable", "d": "PeerUnreachable"}
    assert pipeline.recover() == 1
    again, _ = evaluate(pipeline, make_routes(name_teams(REPLICAS[1:]), [EVALUATED]))
    assert again == expected
    pipeline.reroute()
    assert pipeline.step() == undisturbed[1]


def test_values_that_fell_out_of_the_log_are_computed_again(replicas, undisturbed):
    pipeline = replicas(log_bytes=0)
    found = pipeline.run(die_before=FAULTS["weight gradient"])
    assert sum(one.get("died", False) for one in found.values()) == 1
    go_on(pipeline, undisturbed)


def test_a_host_that_dies_between_the_table_and_the_update_loses_nothing(replicas, undisturbed):
    pipeline = replicas()
    assert all("ran" in one for one in pipeline.run().values())
    pipeline.finish({"d": "die"})
    if pipeline.recover() == 1:  # its rows did not reach the others: the step goes on without it
        pipeline.resume()
        assert pipeline.commit() == undisturbed[1]
    assert pipeline.read_digests() == undisturbed[1]
    pipeline.reroute()
    assert pipeline.step() == undisturbed[2]


def test_a_host_that_was_interrupted_before_its_update_commits_what_another_has_committed(
    replicas, undisturbed
):
    pipeline = replicas()
    assert all("ran" in one for one in pipeline.run().values())
    found = pipeline.finish({"b": "interrupt", "d": "die once all is sent"})
    assert any("norm" in one for one in found.values())
    assert pipeline.recover() == 2
    assert pipeline.read_digests() == undisturbed[1]
    pipeline.reroute()
    assert pipeline.step() == undisturbed[2]


def test_an_update_takes_the_memory_of_the_state_before(hosts, undisturbed):
    pipeline = Pipeline(hosts, REPLICAS, [2, 2], max_norm=0.5)
    for _ in range(2):  # no digests between: on a CPU what numpy reads is not donated while it does
        assert all("ran" in one for one in pipeline.run().values())
        assert [one["kept"] for one in pipeline.finish().values()] == [0] * len(NAMES)
    assert pipeline.read_digests() == undisturbed[1]


def test_a_host_that_dies_in_the_middle_of_its_update_loses_nothing(replicas, undisturbed):
    pipeline = replicas()
    assert all("ran" in one for one in pipeline.run().values())
    found = pipeline.finish({"b": "interrupt", "d": "die in the update"})
    assert {host.name for host, one in found.items() if one.get("died")} == {"d"}
    assert pipeline.recover() == 2, "b has not updated, and knows that all had their sums"
    assert pipeline.read_digests() == undisturbed[1]
    pipeline.reroute()
    assert pipeline.step() == undisturbed[2]


def test_a_host_whose_update_fails_in_its_middle_has_no_state_and_gets_that_of_others(replicas, undisturbed):
    pipeline = replicas()
    assert all("ran" in one for one in pipeline.run().values())
    found = {host.name: one for host, one in pipeline.finish({"b": "fail in the update"}).items()}
    assert found["b"]["error"] == "CallerError"
    (failed,) = (host for host in pipeline.hosts if host.name == "b")
    assert pipeline.ask([failed], "digest")[failed] == {"step": 0, "digests": {}}
    assert pipeline.cut_anew(REPLICAS, [2, 2]) == len(pipeline.list_wanted([failed], REPLICAS)["b"])
    assert pipeline.read_digests() == undisturbed[1]
    assert pipeline.step() == undisturbed[2]


CUT_ANEW = [[("a", 1), ("d", 4)], [("c", 5)]]
"""Without b: some blocks stay, others move, and c gets those that it has not."""


@pytest.mark.parametrize("fault", full_but(FAULTS, "weight gradient".__eq__))
def test_blocks_that_move_in_the_middle_of_a_step_change_no_bit(replicas, undisturbed, fault):
    pipeline = replicas()
    pipeline.run(die_before=Task(FAULTS[fault].kind, 1, Hop(HostName("b"), 2, 5)))
    assert pipeline.cut_anew(CUT_ANEW, [2, 2]) > 0
    pipeline.resume()
    assert pipeline.commit() == undisturbed[1]
    pipeline.routes = make_routes(
        [[(HostName(host), count) for host, count in team] for team in CUT_ANEW], [2, 2]
    )
    assert pipeline.step() == undisturbed[2]


def test_a_second_host_that_dies_while_blocks_move_changes_no_bit(replicas, undisturbed):
    pipeline = replicas()
    pipeline.run(die_before=FAULTS["forward"])
    pipeline.cut_anew(CUT_ANEW, [2, 2])
    pipeline.kill("d")
    assert pipeline.cut_anew([[("a", 2), ("c", 3)]], [4]) >= 0
    pipeline.resume()
    assert pipeline.commit() == undisturbed[1]


def test_a_host_that_is_behind_goes_on_with_one_that_has_begun_the_next_step(replicas, undisturbed):
    pipeline = replicas(wait_timeout_s=2.0)
    assert all("ran" in one for one in pipeline.run().values())
    pipeline.finish({"b": "interrupt", "d": "die once all is sent"})
    (ahead,) = (host for host in pipeline.hosts if host.name == "a")
    found = pipeline.ask([ahead], "run", routes=msgspec.to_builtins(pipeline.routes), die_before=None)
    assert found[ahead]["error"] == "PeerUnreachable", (
        "it waits for b, which has not committed the step before"
    )
    assert pipeline.recover() == 2
    pipeline.resume()
    assert pipeline.commit() == undisturbed[2]


@pytest.mark.parametrize("schedule", ["zero_bubble", "whole_backward"])
def test_a_task_that_fails_in_its_middle_is_run_again_with_all_that_it_needs(replicas, undisturbed, schedule):
    pipeline = replicas(schedule=schedule, wait_timeout_s=2.0)
    routes = msgspec.to_builtins(pipeline.routes)
    for host in pipeline.hosts:
        fault = {"fail_in": (0, 1)} if host.name == "a" else {}
        host.tell("run", routes=routes, **fault)
    found = {host.name: host.answer() for host in pipeline.hosts}
    assert found["a"]["error"] == "CallerError"
    go_on(pipeline, undisturbed)


def test_blocks_move_also_where_some_hosts_have_not_begun_the_step(replicas, undisturbed):
    """What c has not begun for itself is given to a, which has begun nothing, and is about to lose two blocks."""
    pipeline = replicas([[("a", 3), ("b", 2)], [("c", 2), ("d", 3)]], wait_timeout_s=2.0)
    (begun,) = (host for host in pipeline.hosts if host.name == "c")
    routes = msgspec.to_builtins(pipeline.routes)
    assert pipeline.ask([begun], "run", routes=routes)[begun]["error"] == "PeerUnreachable"
    pipeline.kill("b")
    pipeline.cut_anew([[("a", 1), ("d", 4)], [("c", 5)]], [2, 2])
    pipeline.resume()
    assert pipeline.commit() == undisturbed[1]


def test_units_that_move_are_kept_until_the_step_is_committed(replicas, undisturbed):
    """d has sent c what c is to have; c dies before it has any of it."""
    pipeline = replicas()
    pipeline.kill("b")
    pipeline.cut_anew([[("a", 2), ("d", 1), ("c", 2)]], [4])
    pipeline.kill("c")
    assert pipeline.cut_anew([[("a", 2), ("d", 3)]], [4]) >= 0
    pipeline.run()
    assert pipeline.commit() == undisturbed[1]


REPLICA_AND_ONE = [[("a", 2), ("b", 3)], [("c", 5)]]
MEMBERS, JOINED = [[("a", 2), ("b", 2), ("c", 1)]], [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]]
MAX_STEPS = 100
"""Until copies are there: they take a few steps, whose number depends on the machine."""


def copy_units(pipeline, joiner):
    """Have copies made for a host that joins, until all members have theirs; return the digests of these steps."""
    found = []
    pipeline.begin_copies(joiner, JOINED)
    while not all(one["has_told"] for one in pipeline.ask(pipeline.hosts, "has_copies").values()):
        assert len(found) < MAX_STEPS
        found.append(pipeline.step())
    return found


@pytest.mark.parametrize("steps_after", [0, 2])
def test_units_that_were_copied_to_a_host_while_others_trained_need_not_move_and_change_no_bit(
    hosts, steps_after
):
    joiner = hosts[NAMES.index("d")]
    pipeline = Pipeline(hosts[:3], MEMBERS, [MICROBATCHES], max_norm=0.5)
    digests = [pipeline.step(), *copy_units(pipeline, joiner)]
    assert joiner.answer() == {"has_all": True}
    digests += [pipeline.step() for _ in range(steps_after)]
    taken = pipeline.take_copies([joiner], len(digests))
    assert {host: bool(units) for host, units in taken.items()} == dict.fromkeys("abcd", True) | {"a": False}
    assert pipeline.cut_anew(JOINED, [2, 2]) == 0
    digests += [pipeline.step(), pipeline.step()]
    alone = Pipeline(hosts, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    assert digests == [alone.step() for _ in digests]


def test_copies_of_an_earlier_step_are_not_taken(hosts):
    """The sums of the last step are not there: units move as without copies."""
    joiner = hosts[NAMES.index("d")]
    pipeline = Pipeline(hosts[:3], MEMBERS, [MICROBATCHES], max_norm=0.5)
    digests = [pipeline.step(), *copy_units(pipeline, joiner)]
    assert joiner.answer() == {"has_all": True}
    pipeline.ask(pipeline.hosts, "stop_copies")
    digests.append(pipeline.step())
    assert not any(pipeline.take_copies([joiner], len(digests)).values())
    assert pipeline.cut_anew(JOINED, [2, 2]) > 0
    digests.append(pipeline.step())
    alone = Pipeline(hosts, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    assert digests == [alone.step() for _ in digests]


FEWER_LAYERS, WITHOUT_C = [[("a", 1), ("b", 2), ("c", 2)]], [[("a", 3), ("b", 2)]]


def train_until_change(pipeline):
    """Train until the planned change may come; return the digests of these steps."""
    found = []
    while (after := pipeline.find_change()) is None:
        assert len(found) < MAX_STEPS
        found.append(pipeline.step())
    return found, after


@pytest.mark.parametrize("after", [FEWER_LAYERS, WITHOUT_C])
def test_nothing_moves_when_members_have_copied_units_before_a_planned_change(hosts, after):
    """Of a slow stage with fewer layers, or without a host that leaves; one more step is made, as in a job."""
    pipeline = Pipeline(hosts[:3], MEMBERS, [MICROBATCHES], max_norm=0.5)
    digests = [pipeline.step()]
    pipeline.prepare_change(after)
    found, changed_after = train_until_change(pipeline)
    digests += found
    assert changed_after == len(digests), "all let it come after the last step"
    digests.append(pipeline.step())
    pipeline.hosts = pipeline.hosts[: len(after[0])]
    taken = pipeline.take_copies([], len(digests))
    assert any(taken.values())
    assert pipeline.cut_anew(after, [MICROBATCHES]) == 0
    digests += [pipeline.step(), pipeline.step()]
    alone = Pipeline(hosts, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    assert digests == [alone.step() for _ in digests]


def test_a_planned_change_comes_at_its_deadline_without_copies_that_are_late(hosts):
    pipeline = Pipeline(hosts[:3], MEMBERS, [MICROBATCHES], max_norm=0.5)
    digests = [pipeline.step()]
    pipeline.prepare_change(FEWER_LAYERS, timeout_s=0.0)
    digests += [pipeline.step(), pipeline.step()]
    assert pipeline.find_change() == len(digests)
    pipeline.ask(pipeline.hosts, "stop_copies")
    assert pipeline.cut_anew(FEWER_LAYERS, [MICROBATCHES]) > 0
    digests.append(pipeline.step())
    alone = Pipeline(hosts, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    assert digests == [alone.step() for _ in digests]


@pytest.mark.parametrize("victim", full_but(["a", "b"], "b".__eq__))
def test_a_host_that_dies_while_members_copy_units_changes_no_bit(breakable, victim):
    """The first one, which sends b some; or b, which is to have them. Another replica has all units."""
    pipeline = Pipeline(breakable, [[("a", 2), ("b", 1), ("c", 2)], [("d", 5)]], [2, 2], max_norm=0.5)
    digests = [pipeline.step()]
    pipeline.prepare_change([[("a", 1), ("b", 1), ("c", 3)], [("d", 5)]])
    digests += [pipeline.step()]
    hop = {"a": Hop(HostName("a"), 0, 2), "b": Hop(HostName("b"), 2, 3)}[victim]
    pipeline.run(die_before=Task(TaskKind.INPUT_GRADIENT, 1, hop))
    assert pipeline.recover() == len(digests)
    pipeline.resume()
    digests.append(pipeline.commit())
    alone = Pipeline(breakable[3:], [[("d", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    assert digests == [alone.step() for _ in digests]


@pytest.mark.parametrize("victim", full_but(["a", "d"], "a".__eq__))
def test_a_host_that_dies_while_units_are_copied_changes_no_bit(breakable, victim):
    """One that sends copies in the middle of a step, or the one that is to have them."""
    hosts = breakable
    joiner = hosts[NAMES.index("d")]
    pipeline = Pipeline(hosts[:3], REPLICA_AND_ONE, [2, 2], max_norm=0.5)
    digests = [pipeline.step()]
    pipeline.begin_copies(joiner, JOINED)
    digests += [pipeline.step(), pipeline.step()]
    if victim == "d":
        joiner.kill()
        digests += [pipeline.step(), pipeline.step()]
    else:
        pipeline.run(die_before=Task(TaskKind.INPUT_GRADIENT, 1, Hop(HostName("a"), 0, 2)))
        assert pipeline.recover() == len(digests)
        pipeline.resume()
        digests.append(pipeline.commit())
    if victim == "d":
        alone = Pipeline(hosts[:3], [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    else:
        joiner.kill()  # it still waits, for a generation that is over
        alone = Pipeline(hosts[1:3], [[("b", BLOCKS)]], [MICROBATCHES], max_norm=0.5)
    assert digests == [alone.step() for _ in digests]


AXES = ("tensor", "fsdp")
"""Of the two devices of a host."""


@pytest.mark.parametrize("axis", full_but(AXES, lambda axis: axis == "tensor"))
def test_with_several_devices_a_host_weights_are_those_of_one_host_with_the_same_axes(
    breakable, undisturbed, axis
):
    alone = Pipeline(breakable, [[("a", BLOCKS)]], [MICROBATCHES], max_norm=0.5, axis=axis)
    expected = [alone.step() for _ in range(STEPS)]
    assert expected != undisturbed, "the axis changes the order of additions, or nothing is sharded"
    pipeline = Pipeline(breakable, REPLICAS, [3, 1], max_norm=0.5, axis=axis)
    assert pipeline.step() == expected[0]
    pipeline.run(die_before=FAULTS["forward"])
    pipeline.cut_anew(CUT_ANEW, [2, 2])
    pipeline.resume()
    assert pipeline.commit() == expected[1]
    pipeline.routes = make_routes(
        [[(HostName(host), count) for host, count in team] for team in CUT_ANEW], [2, 2]
    )
    assert pipeline.step() == expected[2]
