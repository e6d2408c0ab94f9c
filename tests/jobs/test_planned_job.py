"""A real job whose trainer searches its plans: the plan changes with the hosts, and training continues."""

import contextlib
import functools
import math
import re
import time

import pytest

from resilient_jax.checkpoint import OrbaxStore
from resilient_jax.cluster.job_report import JobComponent, find_pids
from resilient_jax.cluster.standby_schedule import SETTLING_S
from resilient_jax.errors import ExitCode
from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.recovery import newest_step, wait_training
from resilient_jax.protocol.failpoints import FailPoint, FailPointOrder, HangAction
from resilient_jax.step.data_sample import COMPARISON_INTERVAL_STEPS
from resilient_jax.trainer.plan_calibration import FITTED_AFTER
from tests.chaos.cpu_quota import limit_cpu
from tests.jobs.compiled_programs import (
    find_programs_after,
    start_joining_agent,
    wait_compiled_ahead,
    wait_joining,
)
from tests.jobs.launched import make_environment
from tests.support.agents import run_command
from tests.support.paths import MESHES, SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob

JOB = SCRIPTS / "planned_job.py"
TOPOLOGY = MESHES / "local_4x2.toml"
DEADLINE_S = patience(24)
CONFIG = "max_restarts = 10\nrestart_backoff_s = 0.0\n"
STEPS = 10
SEATED_STEPS = 25
JOINED_STEPS = 12
OVER_THREE = "reductions of 'train' over 3 hosts"
"""What is compiled ahead after the programs of the plans without a host."""
MANY_STEPS = 100_000
"""More steps than any test waits for; the end of the test kills the job."""


def launch(
    work, *words, hosts=4, devices=2, topology=TOPOLOGY, steps=STEPS, cold=False, config=CONFIG, options=()
):
    work.mkdir(exist_ok=True)
    (work / "job.toml").write_text(config)
    return PatientJob(
        [str(JOB), str(topology), str(steps), *words],
        num_hosts=hosts,
        run_directory=work / "run",
        options=["--config", str(work / "job.toml"), "--devices-per-host", str(devices), *options],
        environment=make_environment(cold=cold),
    )


def write_topology(path, changes):
    """Write the topology of the tests with other numbers; return its path."""
    text = TOPOLOGY.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    return path


def plans_of(job, host):
    """Return the plans that a host followed, in order."""
    events = sorted(job.read_events(), key=lambda event: event.monotonic_s)
    return [event.detail["plan"] for event in events if event.kind == "plan.chosen" and event.host == host]


def ending(job):
    """Return (SHA-256 of the weights, loss)."""
    words = job.read_output().rpartition("sha256 ")[2].split()
    return words[0], float(words[2])


def run_and_kill(work, *words, victim="host-1", topology=TOPOLOGY):
    """Kill a worker in the reduction of step 3, when the programs of the best plan without it are ready.

    They are compiled for the first loss that each host thinks of: the plan is the same after any. Then the sums.

    Returns:
        The plans of another host, the ending, and all events.
    """
    survivors = [f"host-{index}" for index in range(4) if f"host-{index}" != victim]
    with launch(work, *words, cold=True, topology=topology) as job:
        job.hold(FailPoint.BEFORE_REDUCE, [victim], 3)
        job.wait_held([victim], DEADLINE_S)
        wait_compiled_ahead(job, survivors, [OVER_THREE], DEADLINE_S)
        killed_s = job.kill(JobComponent.WORKER, victim)
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events = job.read_events()
        found = plans_of(job, survivors[-1]), ending(job)
    changed = [e for e in events if e.kind is EventKind.PLAN_CHOSEN and e.detail["before"]]
    assert changed
    # What was given up for the new plan: of hosts and devices as they are the axes before are never faster.
    steps_s = [(float(e.detail["kept_step_s"]), float(e.detail["step_s"])) for e in changed]
    assert all(kept_s >= step_s > 0 for kept_s, step_s in steps_s)
    later = [e for e in events if e.monotonic_s > killed_s and e.host in survivors]
    compiled = {e.host: e.detail["compiled"] for e in later if e.kind is EventKind.PROGRAMS_READY}
    assert compiled == dict.fromkeys(survivors, 0), "all was ready"
    return *found, events


def run_undisturbed(work, *words, topology=TOPOLOGY):
    with launch(work, *words, topology=topology) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        return plans_of(job, "host-0"), ending(job)


def test_when_a_host_dies_the_axes_change_nothing_is_compiled_and_training_reaches_the_same_loss(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    plans, (_, expected) = run_undisturbed(tmp_path / "undisturbed", "--checkpoints", str(checkpoints))
    assert plans == ["replica 4 x fsdp 2"], "of 12 microbatches 3 for each of 4, not 2 for some of 8"
    assert OrbaxStore(checkpoints, 2).find_newest_step() == STEPS, (
        "a state that is split over a host's devices is saved"
    )
    plans, (_, loss), _ = run_and_kill(tmp_path / "killed")
    # Before three hosts train there may be two: a survivor that gloo keeps waiting is left out and comes back.
    assert plans[0] == "replica 4 x fsdp 2"
    assert "replica 6" in plans
    # Other axes, other orders of addition: equal within rounding.
    assert loss == pytest.approx(expected, rel=1e-4)


NOBODY_COMES_BACK = ("--host-restart-delay", "-1")
LARGE_WORDS = ("--named", "--width", "240", "--rows", "192")
TIGHT_MEMORY = {"memory_bytes = 3.16e9": "memory_bytes = 74.5e6"}
"""Too little for the model of `LARGE_WORDS` on the devices of one host."""


def test_when_a_host_dies_a_mesh_over_hosts_is_planned_anew_and_its_shards_come_from_live_holders(tmp_path):
    topology = write_topology(tmp_path / "mesh.toml", TIGHT_MEMORY)
    plans, (_, expected) = run_undisturbed(tmp_path / "undisturbed", *LARGE_WORDS, topology=topology)
    assert plans == ["replica 2 x fsdp 4"]
    plans, (_, loss), events = run_and_kill(tmp_path / "killed", *LARGE_WORDS, topology=topology)
    assert plans[0] == "replica 2 x fsdp 4"
    assert "fsdp 6" in plans, "three hosts are one replica"
    # Other axes, other orders of addition: equal within rounding.
    assert loss == pytest.approx(expected, rel=1e-4)
    kinds = {event.kind for event in events}
    assert EventKind.STATE_FETCHED in kinds
    assert EventKind.SNAPSHOT_RESTORED not in kinds


def test_the_last_host_of_replicas_that_are_one_host_each_trains_on_with_whole_sums(tmp_path):
    """What it had of the step were shards of sums; on a mesh of its own devices alone no array is in shards."""
    words = ["--named", "--spans-hosts", "--rows", "12"]
    run = functools.partial(launch, hosts=2, options=NOBODY_COMES_BACK)
    with run(tmp_path / "undisturbed", *words) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        assert plans_of(job, "host-0") == ["replica 2 x tensor 2"]
        expected = ending(job)
    with run(tmp_path / "killed", *words) as job:
        job.hold(FailPoint.BEFORE_REDUCE, ["host-0", "host-1"], 5)
        job.wait_held(["host-0", "host-1"], DEADLINE_S)
        job.kill(JobComponent.AGENT, "host-1")
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        assert plans_of(job, "host-0") == ["replica 2 x tensor 2", "tensor 2"]
        assert ending(job) == expected
        assert EventKind.USER_ERROR not in {event.kind for event in job.read_events()}


@pytest.mark.full  # its parts are in the test above, and in test_mesh
def test_a_mesh_over_hosts_follows_each_loss_down_to_too_few_hosts_which_wait_for_others(tmp_path):
    topology = write_topology(tmp_path / "mesh.toml", TIGHT_MEMORY)
    words = [*LARGE_WORDS, "--microbatches", "6"]
    work = tmp_path / "job"
    with (
        launch(work, *words, topology=topology, steps=MANY_STEPS, options=NOBODY_COMES_BACK) as job,
        contextlib.ExitStack() as ending,
    ):
        hosts = [f"host-{index}" for index in range(4)]
        wait_training(job, hosts, STEPS, DEADLINE_S)
        for plan in ("fsdp 6", "fsdp 4"):
            job.kill(JobComponent.AGENT, hosts.pop())
            report = wait_training(job, hosts, STEPS, DEADLINE_S)
            assert plans_of(job, "host-0")[-1] == plan
        committed, restores = newest_step(report), list_restores(job)
        job.kill(JobComponent.AGENT, hosts.pop())
        job.wait_report(
            "host-0 waits",
            lambda report: report.generation is not None and report.generation.record.needed_hosts.count == 2,
            DEADLINE_S,
        )
        command = [str(JOB), str(topology), str(MANY_STEPS), *words]
        ending.enter_context(
            start_joining_agent(
                job, tmp_path / "joined", "host-2", command, ["--config", str(work / "job.toml")]
            )
        )
        wait_training(job, ["host-0", "host-2"], STEPS, DEADLINE_S)
        after = list_restores(job)[len(restores) :]
        assert after, "of half of the shards only parity was left"
        assert min(after) >= committed, "what hosts had said to be done is not done again"


def list_restores(job):
    """Return the steps of the snapshots that hosts have gone on from, in order."""
    events = sorted(job.read_events(), key=lambda event: event.monotonic_s)
    return [int(event.detail["step"]) for event in events if event.kind is EventKind.SNAPSHOT_RESTORED]


@pytest.mark.full  # a part of what follows when a host dies
def test_where_only_replicas_are_lost_the_weights_have_the_same_bits(tmp_path):
    plans, expected = run_undisturbed(tmp_path / "undisturbed", "--named")
    assert plans == ["replica 4 x tensor 2"]
    plans, found, _ = run_and_kill(tmp_path / "killed", "--named")
    assert plans[0] == "replica 4 x tensor 2"
    assert "replica 3 x tensor 2" in plans
    assert found == expected


@pytest.mark.full
def test_a_standby_in_its_seat_follows_the_plan_of_the_worker_that_it_replaces_with_the_same_bits(tmp_path):
    plan = "replica 2 x tensor 2"
    config = "restart_backoff_s = 0.0\nstandby = "
    launch_seated = functools.partial(launch, hosts=2, steps=SEATED_STEPS)
    with launch_seated(tmp_path / "undisturbed", "--named", config=f'{config}"off"\n') as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        assert plans_of(job, "host-0") == [plan]
        expected = ending(job)
    with launch_seated(tmp_path / "killed", "--named", config=f'{config}"seat"\n') as job:
        # A standby starts at a commit, once the world has trained for some seconds.
        job.hold(FailPoint.BEFORE_REDUCE, ["host-0"], 5)
        late = FailPointOrder(failpoint=FailPoint.BEFORE_REDUCE, step=20, hosts=("host-0",), name="late")
        job.failpoints.set_order(late)
        job.wait_held(["host-0"], DEADLINE_S)
        time.sleep(SETTLING_S)
        job.release()
        job.wait_event(
            "a standby of host-1",
            lambda event: event.kind is EventKind.STANDBY_READY and event.host == "host-1",
            DEADLINE_S,
        )
        job.wait_held(["host-0"], DEADLINE_S, late.name)
        job.kill(JobComponent.WORKER, "host-1")
        job.failpoints.release(late.name)
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        assert set(plans_of(job, "host-0")) == set(plans_of(job, "host-1")) == {plan}, "no step by one host"
        formed = [
            event.detail["change"] for event in job.read_events() if event.kind is EventKind.WORLD_FORMED
        ]
        assert formed == ["reform", "reform", "grow", "grow"]
        assert ending(job) == expected


TRACE_S = 4.0
"""So long each program of the user's loss takes at least: longer than a worker that starts again is expected to be
away, less the pause."""


@pytest.mark.full  # what is decided, and when: pure/membership/test_planned_axes.py
@pytest.mark.parametrize(
    ("victims", "words", "action", "plan"),
    [
        (["host-1"], ["--no-compile-ahead", "--own-loop"], "keep_axes", "replica 3 x fsdp 2"),
        pytest.param(
            ["host-1", "host-3"],
            ["--no-compile-ahead"],
            "keep_axes",
            "replica 2 x fsdp 2",
            marks=pytest.mark.full,
        ),
        pytest.param(["host-1"], [], "shrink", "replica 6", marks=pytest.mark.full),
    ],
)
def test_the_leader_keeps_axes_where_programs_of_better_ones_are_slow_and_not_ready(
    tmp_path, victims, words, action, plan
):
    survivors = [f"host-{index}" for index in range(4) if f"host-{index}" not in victims]
    with launch(tmp_path, "--trace-s", str(TRACE_S), *words, steps=MANY_STEPS) as job:
        job.hold(FailPoint.BEFORE_REDUCE, victims, 3)
        # None of them answers before it is killed, so they are lost in one change.
        job.wait_held(victims, DEADLINE_S)
        if not words:
            wait_compiled_ahead(job, survivors, [OVER_THREE], DEADLINE_S)
        killed_s = min([job.kill(JobComponent.WORKER, victim) for victim in victims])
        job.release()

        def is_later(event: Event, kind: EventKind) -> bool:
            return event.kind is kind and event.monotonic_s > killed_s

        decided = job.wait_event("a decision", lambda e: is_later(e, EventKind.RECOVERY_DECIDED), DEADLINE_S)
        assert decided.detail["action"] == action
        assert "keep_axes: score" in str(decided.detail["options"])
        for host in survivors:
            chosen = job.wait_event(
                f"the plan of {host}",
                lambda event, host=host: is_later(event, EventKind.PLAN_CHOSEN) and event.host == host,
                DEADLINE_S,
            )
            assert (chosen.generation, chosen.detail["plan"]) == (decided.generation, plan)


SLOW_SECOND_STEP_S = 8.0
"""Longer than the first one. How long programs take to be ready is how much longer the first step was, so then it is a
second, the least that they are priced at, and kept axes have cost as much after few seconds."""
GIVEN_UP_S = patience(6)


@pytest.mark.full
def test_axes_that_are_kept_for_a_lost_host_are_given_up_if_it_is_not_back(tmp_path):
    # Four hosts are hardly faster with fsdp, three are a tenth slower.
    topology = write_topology(tmp_path / "slow_devices.toml", {"= 2.2e9": "= 1.1e9", "= 0.90e9": "= 1.8e9"})
    config = 'restart_backoff_s = 600.0\nstandby = "off"\n'
    options = {"topology": topology, "steps": MANY_STEPS, "config": config}
    with launch(tmp_path, "--no-compile-ahead", **options) as job:
        job.failpoints.set_order(
            FailPointOrder(
                failpoint=FailPoint.BEFORE_REDUCE,
                step=1,
                hosts=("host-0",),
                action=HangAction(duration_s=SLOW_SECOND_STEP_S),
                name="slow",
            )
        )
        # A worker that dies for the first time is started again at once.
        job.hold(FailPoint.BEFORE_REDUCE, ["host-1"], 5)
        job.wait_held(["host-1"], DEADLINE_S)
        wait_estimated(job, 1, hosts=4)
        job.kill(JobComponent.WORKER, "host-1")
        job.release()
        wait_estimated(job, 3, hosts=4)
        job.hold(FailPoint.BEFORE_REDUCE, ["host-1"])
        job.wait_held(["host-1"], DEADLINE_S)
        job.kill(JobComponent.WORKER, "host-1")
        job.release()
        job.wait_event(
            "other axes",
            lambda event: event.kind is EventKind.PLAN_CHOSEN and event.detail["plan"] == "replica 6",
            GIVEN_UP_S,
        )
        events, plans = job.read_events(), plans_of(job, "host-0")
    decided = [event for event in events if event.kind is EventKind.RECOVERY_DECIDED]
    assert [event.detail["action"] for event in decided] == ["keep_axes", "join", "keep_axes"]
    ended = [e for e in events if e.kind is EventKind.GENERATION_PHASE and e.detail["phase"] == "pause"][-1]
    assert "axes were kept long enough, and host-1 did not come back" in str(ended.detail["reason"])
    # How long is a decision, tested in tests/pure/membership/test_planned_axes.py: events are written a little later.
    assert float(decided[-1].detail["wait_s"]) > 0
    assert plans == [*["replica 4 x fsdp 2", "replica 3 x fsdp 2"] * 2, "replica 6"]


def wait_estimated(job, generation, hosts):
    """Wait until the leader knows what losses would make of this generation, or a later one, of so many hosts."""

    def is_estimated(report):
        now = report.generation
        if now is None or now.number < generation or len(now.membership.members) != hosts:
            return False
        workers = [host.worker for host in report.hosts if host.worker is not None]
        plans = [
            worker.report.findings.plans for worker in workers if worker.report.findings.plans is not None
        ]
        return any(found.generation == now.number for found in plans)

    job.wait_report(f"estimates of generation {generation}", is_estimated, DEADLINE_S)


@pytest.mark.full  # host-1 is above
@pytest.mark.parametrize("victim", ["host-0", "host-2", "host-3"])
def test_after_losing_any_host_nothing_is_compiled(tmp_path, victim):
    plans, *_ = run_and_kill(tmp_path, victim=victim)
    assert "replica 6" in plans


@pytest.mark.full
def test_after_a_host_has_joined_nothing_is_compiled_by_the_others(tmp_path):
    """One of them was so slow that it has no microbatch in the first step with the new host: its total is empty."""
    stay = ["host-0", "host-1", "host-2"]
    with launch(tmp_path, hosts=3, steps=JOINED_STEPS, cold=True) as job, contextlib.ExitStack() as ending:
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-0"], 3, DEADLINE_S):
            wait_compiled_ahead(job, stay, ["with host-3", "reductions of 'train' over 4 hosts"], DEADLINE_S)
            report = job.wait_report("the records", lambda _: True, DEADLINE_S)
            (pid,) = find_pids(report, JobComponent.WORKER, "host-1")
            lift_limit = limit_cpu(pid, 0.04)
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-0"], 9, DEADLINE_S):
            lift_limit()
            command = [str(JOB), str(TOPOLOGY), str(JOINED_STEPS)]
            ending.enter_context(
                start_joining_agent(
                    job, tmp_path / "joined", "host-3", command, ["--config", str(tmp_path / "job.toml")]
                )
            )
            wait_joining(job, "host-3", DEADLINE_S)
        job.wait_report(
            "the axes of four hosts, as the leader decided",
            lambda report: (
                report.generation is not None
                and len(report.generation.membership.members) == 4
                and report.generation.shape.plan_axes[:1]
                == ((0, (("fsdp", 2), ("expert", 1), ("tensor", 1))),)
            ),
            DEADLINE_S,
        )
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events = job.read_events()
    assert "replica 4 x fsdp 2" in {e.detail["plan"] for e in events if e.kind is EventKind.PLAN_CHOSEN}
    assert find_programs_after("grow", events, stay) == {host: [0, 0, 0] for host in stay}


@pytest.mark.full
def test_estimates_of_a_running_job_become_better_and_count_from_the_next_change_on(tmp_path):
    with launch(tmp_path, "--calibrate", steps=MANY_STEPS, cold=True) as job:

        def wait_calibrated(what: str, before: str = "") -> Event:
            return job.wait_event(
                f"constants fitted to {what}",
                lambda event: event.kind is EventKind.PLAN_CALIBRATED and event.detail["plan"] != before,
                DEADLINE_S,
            )

        first = wait_calibrated("the first plan")
        job.wait_report(
            "constants of all hosts, which foresee each loss with them",
            lambda report: all(
                host.worker is not None
                and host.worker.report.findings.plans is not None
                and host.worker.report.findings.plans.fitted
                for host in report.hosts
            ),
            DEADLINE_S,
        )
        killed_s = job.kill(JobComponent.HOST, "host-1")
        fitted = wait_calibrated("another plan", str(first.detail["plan"]))
        back = job.wait_event(
            "the plan of the host that is back, whose worker has measured nothing",
            lambda event: (
                event.kind is EventKind.PLAN_CHOSEN
                and event.host == "host-1"
                and event.monotonic_s > killed_s
            ),
            DEADLINE_S,
        )
        with_host_1 = job.wait_for(
            "the plans of all hosts", lambda: list_all_plans(job, back.generation, 4), DEADLINE_S
        )
        events = job.read_events()
    second = fitted.detail
    assert float(first.detail["error"]) < float(first.detail["error_before"])
    assert int(second["plans"]) >= 2
    chosen = list_plans(events, fitted.generation)
    assert {"host-0", "host-2", "host-3"} <= chosen.keys()
    assert len(set(chosen.values())) == 1, "the same constants"
    assert len(set(with_host_1.values())) == 1, "of a host that joins, too"
    # The plan had not been measured when it was chosen.
    before, after = (
        abs(math.log(float(estimate) / float(second["step_s"])))
        for estimate in (second["estimated_s"], chosen["host-0"][1])
    )
    assert after < before
    for event in events:
        if event.kind is EventKind.PLAN_CALIBRATED:
            # Half of the steps took as long as their median, or longer.
            least_s = FITTED_AFTER[0] / 2 * float(event.detail["step_s"])
            assert find_compiled_s(events, event) <= event.monotonic_s - least_s, "of steps meanwhile"


def list_plans(events, generation):
    """Return by host the plan that it chose in a generation, with the estimate of its step."""
    return {
        event.host: (event.detail["plan"], event.detail["step_s"])
        for event in events
        if event.kind is EventKind.PLAN_CHOSEN and event.generation == generation
    }


def list_all_plans(job, generation, hosts):
    """Return the same as soon as so many hosts have one."""
    found = list_plans(job.read_events(), generation)
    return found if len(found) == hosts else None


def find_compiled_s(events, fitted):
    """Return when the host that has fitted constants had compiled its last program of that generation."""
    compiled = [
        event.monotonic_s
        for event in events
        if event.kind is EventKind.PROGRAM_COMPILED_AHEAD
        and (event.host, event.generation) == (fitted.host, fitted.generation)
    ]
    return max(compiled, default=0.0)


LONG_SUMS = {"= 0.90e9": "= 1e3", "= 16.8e9": "= 168e9", "= 4.3e9": "= 43e9", "= 2.2e9": "= 22e9"}
"""Fast devices behind links so slow that sums take all but a ten-millionth of a step, so that until the next failure,
expected in 1600 h, the best axes give back 0.2 s. Programs that are not ready are priced at a second at least."""


@pytest.mark.full
def test_hosts_join_with_the_axes_of_the_job_where_others_give_back_less_than_their_programs_take(tmp_path):
    topology = write_topology(tmp_path / "slow_links.toml", LONG_SUMS)
    stay = ["host-0", "host-1", "host-2"]
    command = [str(JOB), str(topology), str(JOINED_STEPS), "--no-compile-ahead"]
    with (
        launch(tmp_path, *command[3:], hosts=3, topology=topology, steps=JOINED_STEPS, cold=True) as job,
        contextlib.ExitStack() as ending,
    ):
        last = FailPointOrder(
            failpoint=FailPoint.BEFORE_REDUCE, step=JOINED_STEPS - 1, hosts=("host-0",), name="last"
        )
        job.failpoints.set_order(last)
        # Steps before it end with the report of what the axes of four hosts would make.
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-0"], 9, DEADLINE_S):
            options = ["--config", str(tmp_path / "job.toml")]
            joining = start_joining_agent(job, tmp_path / "joined", "host-3", command, options)
            ending.enter_context(joining)
            wait_joining(job, "host-3", DEADLINE_S)
        joined = job.wait_report(
            "four hosts",
            lambda report: report.generation is not None and len(report.generation.membership.members) == 4,
            DEADLINE_S,
        )
        job.failpoints.release(last.name)
        assert (job.wait(DEADLINE_S), joining.wait(DEADLINE_S)) == (0, 0), job.read_tail()
        events, output = job.read_events(), job.read_output() + joining.output()
    (decided,) = [event for event in events if event.kind is EventKind.RECOVERY_DECIDED]
    first, second, *_ = str(decided.detail["options"]).split("; ")
    assert decided.detail["action"] == "keep_axes"
    assert first.startswith("keep_axes: score")
    assert second.startswith("join: score")
    assert "not possible" not in first + second, "to join with the best axes was another option"
    assert joined.generation is not None
    assert joined.generation.shape.plan_axes == ((0, (("fsdp", 1), ("expert", 1), ("tensor", 1))),)
    for host in stay:
        assert plans_of(job, host) == ["replica 6", "replica 8"], "one replica a device, before and after"
    assert find_programs_after("grow", events, stay) == {host: [0, 0, 0] for host in stay}
    ended = dict(re.findall(r"host (\d) ended with ([0-9a-f]+)", output))
    assert sorted(ended) == ["0", "1", "2", "3"]
    assert len(set(ended.values())) == 1, "the host that joined has these axes, too"


@pytest.mark.full  # and test_trainer_sharded.py
def test_programs_compiled_ahead_keep_no_devices_of_a_world_that_is_left(tmp_path):
    with launch(tmp_path, steps=MANY_STEPS) as job:
        for name in ("host-0", "host-2"):
            job.wait_event(
                f"{name} has compiled ahead",
                lambda event, name=name: (
                    event.kind is EventKind.PROGRAM_COMPILED_AHEAD and event.host == name
                ),
                DEADLINE_S,
            )
        job.kill(JobComponent.COORDINATION_SERVICE, "leader")  # all form a new world
        for name in ("host-0", "host-2"):
            left = job.wait_event(
                f"{name} left its world",
                lambda event, name=name: event.kind is EventKind.WORLD_LEFT and event.host == name,
                DEADLINE_S,
            )
            assert left.detail["leaked_backends"] == 0


def test_a_host_that_is_not_in_the_topology_ends_the_job_with_a_remedy(tmp_path):
    topology = tmp_path / "other.toml"
    topology.write_text(TOPOLOGY.read_text().replace("host-{0..3}", "node-{0..3}"))
    with launch(tmp_path, hosts=2, topology=topology) as job:
        assert job.wait(DEADLINE_S) != ExitCode.DONE
        said = job.read_output()
    assert (
        "planner: found the hosts host-0, host-1, expected names of topology local_4x2 (node-0, ...)" in said
    )


@pytest.mark.full  # a pair: lost devices are in test_gpu_failures.py
def test_a_host_that_loses_a_device_follows_a_plan_for_unequal_hosts(tmp_path):
    with launch(tmp_path, hosts=2, steps=MANY_STEPS) as job:
        job.hold(FailPoint.BEFORE_REDUCE, ["host-0"], 3)
        job.wait_held(["host-0"], DEADLINE_S)
        code, said = run_command(["hosts", str(tmp_path / "run"), "drain", "host-1:1"])
        assert code == 0, said
        job.wait_event("a worker with one device", lambda event: event.kind is EventKind.DEVICES_CHANGED)
        job.release()
        job.wait_event(
            "a plan for three devices",
            lambda event: event.kind is EventKind.PLAN_CHOSEN and event.detail["plan"] == "replica 3",
            DEADLINE_S,
        )
        began = max(
            host.progress.step
            for host in job.wait_report("the hosts", lambda report: bool(report.hosts)).hosts
        )
        # Twice, so that the hosts have compared their states at least once since then.
        goal = began + 2 * COMPARISON_INTERVAL_STEPS
        job.wait_report(
            f"step {goal}",
            lambda report: min(host.progress.step for host in report.hosts) >= goal,
            DEADLINE_S,
        )
        assert not [event for event in job.read_events() if event.kind is EventKind.STATE_DIFFERS]
        assert "planner: host-1 has 1 of the 2 devices that topology local_4x2 gives it" in job.read_output()


UNEQUAL = "replica 2 x fsdp 2 and fsdp 3"
"""Of a host with four devices and one with three, each of which has too little memory for the model."""
LATER_STEPS = 60


NARROW = {
    "devices_per_host = 2": "devices_per_host = 4",
    "memory_bytes = 3.16e9": "memory_bytes = 75.3e6",
    # As if links were fast: else one host's devices would be as fast as two hosts with all of theirs.
    "= 2.2e9": "= 900e9",
    "0.90e9": "90e9",
    "5.3e-5": "1e-6",
}
"""Hosts with four devices that are too small for the model alone."""


@pytest.mark.full
def test_hosts_whose_replicas_differ_in_axes_have_the_same_bits_after_a_clip_by_the_global_norm(tmp_path):
    topology = write_topology(tmp_path / "narrow.toml", NARROW)
    # Thirteen microbatches: of twelve three equal replicas, which leave a device out, are as fast.
    words = ["--clip", "--rows", "12", "--width", "240", "--microbatches", "13", "--axes-by-host"]
    config = 'min_hosts = 2\nrestart_backoff_s = 0.0\nstandby = "off"\ndevices_after_loss = "all"\n'
    options = {"hosts": 2, "devices": 4, "topology": topology, "steps": LATER_STEPS, "config": config}
    with launch(tmp_path / "job", *words, **options) as job:
        job.hold(FailPoint.BEFORE_REDUCE, ["host-0"], 3)
        late = FailPointOrder(failpoint=FailPoint.BEFORE_REDUCE, step=20, hosts=("host-0",), name="late")
        job.failpoints.set_order(late)
        job.wait_held(["host-0"], DEADLINE_S)
        code, said = run_command(["hosts", str(job.run_directory), "drain", "host-1:3"])
        assert code == 0, said
        job.wait_event("a worker with three devices", lambda event: event.kind is EventKind.DEVICES_CHANGED)
        job.release()
        # The steps until then have gradients that are clipped by a norm over shards of other shapes on each host.
        job.wait_held(["host-0"], DEADLINE_S, late.name)
        job.kill(JobComponent.WORKER, "host-1")
        job.failpoints.release(late.name)
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, output = job.read_events(), job.read_output()
    chosen = [event for event in events if event.kind is EventKind.PLAN_CHOSEN and event.host == "host-1"]
    assert (UNEQUAL, "unequal") in {(event.detail["plan"], event.detail["axes"]) for event in chosen}
    assert not [event for event in events if event.kind is EventKind.STATE_DIFFERS]
    ended = dict(re.findall(r"host (\d) ended with ([0-9a-f]+)", output))
    assert sorted(ended) == ["0", "1"]
    assert ended["0"] == ended["1"]


def test_more_devices_than_in_the_topology_end_the_job_with_both_numbers(tmp_path):
    with launch(tmp_path, hosts=2, devices=3) as job:
        assert job.wait(DEADLINE_S) != ExitCode.DONE
        said = job.read_output()
    assert "found 3 devices on host host-" in said
    assert "expected 2 by topology local_4x2" in said
