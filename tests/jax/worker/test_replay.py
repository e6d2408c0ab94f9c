"""`resilient-jax replay`: which step is compared, what is refused and why, what a script is told."""

import jax.numpy as jnp
import pytest

from resilient_jax.cli.replay_comparison import (
    compare_digests,
    describe_other_script,
    find_last_step,
    read_recorded_run,
)
from resilient_jax.errors import CallerError, StateError
from resilient_jax.ids import HostName
from resilient_jax.protocol.replay import ReplayOrder
from resilient_jax.protocol.step_digests import (
    ENTRY_ENCODER,
    ReplayBegun,
    RunEntry,
    StepDigests,
    SumDigest,
    read_digest_logs,
)
from resilient_jax.worker.digest_log import DigestLog, DigestObserver
from resilient_jax.worker.replay import ReplayControl
from resilient_jax.worker.training_control import GenerationEnded
from tests.support.standalone_world import make_world

SUM = SumDigest(digest="aa", num_microbatches=4, reduction="exact", replica="2 devices of one host")


def make_run(**changes):
    facts = {
        "host": "a",
        "command": ("train.py",),
        "working_directory": "/",
        "platform": "cpu",
        "num_devices": 2,
        "script": {"script": "1", "arguments": "[]"},
        "wall_s": 0.0,
    }
    return RunEntry(**{**facts, **changes})


def make_step(step, state="s", total=SUM, generation=1):
    return StepDigests(host="a", generation=generation, step=step, sums={"train": total}, state=state)


def write_log(path, *entries):
    path.write_bytes(b"".join(ENTRY_ENCODER.encode(entry) + b"\n" for entry in entries))
    return path


def record(tmp_path, *steps):
    return read_recorded_run(tmp_path, {"a": write_log(tmp_path / "a", make_run(), *steps)}, 0)


def test_a_replay_goes_up_to_the_next_recorded_step(tmp_path):
    recorded = record(tmp_path, make_step(3), make_step(7))
    assert [find_last_step(recorded, tmp_path, step) for step in (0, 3, 4, 7)] == [3, 3, 7, 7]
    with pytest.raises(CallerError, match="replay of step 8: found digests up to step 7"):
        find_last_step(recorded, tmp_path, 8)


@pytest.mark.parametrize(
    ("total", "why"),
    [
        (
            SumDigest(digest="a", num_microbatches=4, reduction="fast", replica="1 device of one host"),
            "floats",
        ),
        (
            SumDigest(digest="a", num_microbatches=4, reduction="exact", replica="4 devices of 2 hosts"),
            "2 hosts",
        ),
    ],
    ids=["fast", "replica of two hosts"],
)
def test_what_one_machine_cannot_compute_with_the_same_bits_is_refused_by_name(total, why, tmp_path):
    with pytest.raises(StateError, match=f"found the sum 'train' .*{why}"):
        find_last_step(record(tmp_path, make_step(3, total=total)), tmp_path, 3)


def test_a_step_of_which_no_host_had_a_sum_or_a_complete_state_is_refused(tmp_path):
    entry = StepDigests(host="a", generation=1, step=3, sums={}, state="")
    with pytest.raises(StateError, match="found neither a sum over microbatches nor a complete state"):
        find_last_step(record(tmp_path, entry), tmp_path, 3)


def test_a_folder_without_digests_is_refused(tmp_path):
    with pytest.raises(CallerError, match=f"found no digests of steps in {tmp_path}"):
        read_recorded_run(tmp_path, {}, 5)


def test_of_several_workers_that_recorded_the_last_one_says_what_ran(tmp_path):
    logs = {
        "a": write_log(tmp_path / "a", make_run(host="a", wall_s=9.0), make_step(5)),
        "b": write_log(tmp_path / "b", make_run(host="b", wall_s=4.0), make_step(2)),
    }
    recorded = read_recorded_run(tmp_path, logs, 0)
    assert recorded.run.host == "a"
    assert [entry.step for entry in recorded.steps] == [2, 5]


def test_equal_other_and_missing_digests_are_told_apart(tmp_path):
    recorded = record(tmp_path, make_step(1), make_step(2), make_step(3, state=""))
    other = SumDigest(digest="bb", num_microbatches=4, reduction="exact", replica=SUM.replica)
    computed = [ReplayBegun(step=0), make_step(0), make_step(1), make_step(2, total=other), make_step(3)]
    rows = [(row.step, row.what, row.is_equal) for row in compare_digests(recorded, computed)]
    assert rows == [
        (0, "sum 'train'", None),
        (0, "state", None),
        (1, "sum 'train'", True),
        (1, "state", True),
        (2, "sum 'train'", False),
        (2, "state", True),
        (3, "sum 'train'", True),
        (3, "state", None),
    ]


def test_a_job_that_recorded_two_digests_of_a_step_differs_from_any(tmp_path):
    recorded = record(tmp_path, make_step(1, state="s"), make_step(1, state="t"))
    (row,) = [row for row in compare_digests(recorded, [make_step(1)]) if row.what == "state"]
    assert (row.committed, row.is_equal) == ("s, t", False)


def test_of_a_step_that_a_job_has_done_again_the_last_digest_counts(tmp_path):
    recorded = record(tmp_path, make_step(1, state="wrong", generation=3), make_step(1, generation=5))
    (row,) = [row for row in compare_digests(recorded, [make_step(1)]) if row.what == "state"]
    assert row.is_equal


def test_other_microbatches_are_an_error_that_names_both_numbers(tmp_path):
    other = SumDigest(digest="aa", num_microbatches=8, reduction="exact", replica=SUM.replica)
    with pytest.raises(StateError, match="found other microbatches in the sum 'train': 8, expected 4"):
        compare_digests(record(tmp_path, make_step(1)), [make_step(1, total=other)])


def test_another_script_is_named_by_what_differs():
    recorded = make_run(script={"script": "1", "arguments": "[]", "module only_here": "5"})
    assert describe_other_script(recorded, make_run()) == ""
    changed = make_run(script={"script": "2", "arguments": "[]"}, num_devices=1)
    assert describe_other_script(recorded, changed) == "script was 1, is 2; devices of a host were 2, are 1"


def make_control(tmp_path, **changes):
    order = ReplayOrder(**{"step": 5, "last_step": 6, "output": str(tmp_path / "out"), **changes})
    return ReplayControl(order, DigestLog(tmp_path / "out", "replay", pytest.fail))


def test_a_replay_ends_before_the_step_after_its_last_one(tmp_path):
    control = make_control(tmp_path)
    for step in (4, 5, 6):
        control.begin_step(step)
    with pytest.raises(GenerationEnded):
        control.begin_step(7)
    assert ReplayBegun(step=4) in read_digest_logs([tmp_path / "out"])


def test_a_loop_that_loads_a_newer_checkpoint_is_told_how_to_load_another(tmp_path):
    with pytest.raises(StateError, match=r"begins with the state after 6 steps.*world\.replay\.step"):
        make_control(tmp_path).begin_step(6)


def test_a_loop_that_begins_from_0_does_so_only_if_that_was_asked_for(tmp_path):
    with pytest.raises(StateError, match=r"begins with the initial state.*--from-start"):
        make_control(tmp_path).begin_step(0)
    make_control(tmp_path, from_start=True).begin_step(0)


def train(path, *, scale=1.0, num_microbatches=2):
    """Commit two steps of an accumulation; return their digests."""
    log = DigestLog(path, "a", pytest.fail)
    world = make_world()
    observer = DigestObserver(log, HostName("a"), world._info, interval_steps=1)
    world = make_world(observers=[observer])
    for _ in world.steps(2):
        total = world.accumulate_microbatches(
            num_microbatches, lambda batch: jnp.full(3, scale * (batch.index + 1)), jnp.zeros(3)
        )
        world.commit({"w": total})
    return [entry for entry in read_digest_logs([path]) if isinstance(entry, StepDigests)]


def test_equal_steps_have_equal_digests_and_a_changed_bit_gives_others(tmp_path):
    first, again, other = (
        train(tmp_path / name, scale=scale) for name, scale in (("1", 1.0), ("2", 1.0), ("3", 1.0 + 2.0**-23))
    )
    assert [entry.step for entry in first] == [0, 1]
    assert first == again
    assert all(a.sums["train"].digest != b.sums["train"].digest for a, b in zip(first, other, strict=True))
    assert all(a.state != b.state and len(a.state) == 16 for a, b in zip(first, other, strict=True))


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path):
    reports = []
    log = DigestLog(tmp_path / "missing" / "log", "a", reports.append)
    log.write(make_step(0))
    log.write(make_step(1))
    assert reports == [f"{tmp_path / 'missing' / 'log'}: No such file or directory"]
