"""Checkpoints: written during training, verified when read, and exchanged with plain Orbax."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

import resilient_jax as rj
from resilient_jax.errors import CallerError, CheckpointFailed, CheckpointUnreadable, StateError
from resilient_jax.events import EventKind
from resilient_jax.jax_runtime.worker_environment import set_device_count
from resilient_jax.protocol.state_records import StateLoss
from resilient_jax.trainer.checkpoint_restore import restore_newest
from tests.process.checkpoint.storage_processes import (
    end_idle_processes,
    find_storage_process,
    lend_process,
    take_back_process,
)
from tests.support.agents import free_port
from tests.support.patience import patience, wait_until
from tests.support.summing_hosts import add_messages
from tests.support.whole_checkpoints import WholeStore

WORKER = Path(__file__).with_name("trainer_orbax_worker.py")
DEADLINE_S = patience(24)


class Recorder:
    """A `record_event` that keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, dict[str, Any]]] = []

    def __call__(self, kind, **detail):
        self.events.append((kind, detail))

    def of(self, kind):
        return [detail for found, detail in self.events if found is kind]


class State(NamedTuple):
    """A stand-in for the trainer's state."""

    step: Any
    variables: Any
    optimizer: Any
    patience: Any


def make_state(step=3):
    rng = np.random.default_rng(step)
    numbers = rng.normal(size=(300, 400)).astype(np.float32)
    return State(
        step=jnp.int32(step),
        variables={
            "wide": jnp.asarray(numbers),
            "layers": {2: jnp.asarray(numbers[0]), 10: jnp.asarray(numbers[1])},
            "list": [jnp.asarray([True, False]), (jnp.asarray(numbers[2], jnp.bfloat16),)],
            "int4": jnp.asarray(np.arange(-8, 8), jnp.int4),
            "float8": jnp.asarray(numbers[3], jnp.float8_e4m3fn),
            "key": jax.random.key(step),
            "no rows": jnp.zeros((0, 3)),
            "nothing": {},
        },
        optimizer=(optax.EmptyState(), optax.ScaleByAdamState(jnp.int32(step), {"w": jnp.ones(2)}, ()), None),
        patience=(),
    )


def abstract(state):
    return jax.eval_shape(lambda tree: tree, state)


def to_bytes(tree):
    def raw(leaf):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

    return jax.tree.structure(tree), [raw(leaf) for leaf in jax.tree.leaves(tree)]


@contextlib.contextmanager
def open_store(directory, **options):
    with contextlib.closing(WholeStore(directory, **{"max_to_keep": 2, **options})) as store:
        lend_process(store)
        yield store
        take_back_process(store)


@pytest.fixture(scope="module", autouse=True)
def storage_processes():
    yield
    end_idle_processes()


@contextlib.contextmanager
def stopped(process):
    """Suspend a process in the body of the context manager."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def names_in(directory):
    return sorted(os.listdir(directory))


# During training.


def start_worker(stack, *arguments):
    worker = stack.enter_context(
        subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": set_device_count(os.environ.get("XLA_FLAGS", ""), 2),
            },
        )
    )
    stack.callback(worker.kill)
    return worker


def test_another_process_than_the_first_saves_and_reads_while_the_first_is_suspended(tmp_path):
    port, directory = free_port(), tmp_path / "checkpoints"
    with contextlib.ExitStack() as stack:
        stopped_one, saver = (start_worker(stack, "member", directory, index, port) for index in (0, 1))
        for one in (stopped_one, saver):
            assert one.stdout is not None
            assert one.stdout.readline() == "connected\n"
        assert stopped_one.stdin is not None
        stopped_one.stdin.write("stop\n")
        stopped_one.stdin.flush()
        os.waitpid(stopped_one.pid, os.WUNTRACED)
        out, err = saver.communicate("go\n", timeout=DEADLINE_S)
        assert saver.returncode == 0, err
        assert out == "saved ['5', '7']\n"


def test_a_save_in_flight_keeps_no_devices_of_a_world_that_is_left(tmp_path):
    with contextlib.ExitStack() as stack:
        worker = start_worker(stack, "leave", tmp_path)
        _, err = worker.communicate(timeout=DEADLINE_S)
        assert worker.returncode == 0, err


def test_the_saved_state_is_that_of_the_call_although_its_arrays_are_donated_before_the_write(tmp_path):
    state = make_state()
    expected = to_bytes(state)
    with open_store(tmp_path) as store:
        store.save(1, {"warm": jnp.zeros(3)})
        with stopped(find_storage_process(store)):
            assert store.try_save(2, state)
            wide = state.variables["wide"]
            overwritten = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(wide)
            assert bool(jnp.all(overwritten == -1))
            assert wide.is_deleted()
        store.wait_until_saved()
        assert to_bytes(store.load(2, abstract(make_state()))) == expected


def test_a_save_that_is_due_while_one_is_in_flight_is_skipped_with_an_event(tmp_path):
    note = Recorder()
    with open_store(tmp_path) as store:
        store.save(1, make_state(1))
        with stopped(find_storage_process(store)):
            assert store.try_save(2, make_state(2), note)
            assert not store.try_save(3, make_state(3), note)
        store.wait_until_saved(note)
        assert to_bytes(store.load(2, abstract(make_state()))) == to_bytes(make_state(2))
    (skipped,) = note.of(EventKind.CHECKPOINT_SKIPPED)
    assert (skipped["step"], skipped["in_flight"]) == (3, 2)
    (saved,) = note.of(EventKind.CHECKPOINT_SAVED)
    assert saved["step"] == 2
    assert saved["bytes"] > 300 * 400 * 4 * 0.5
    assert names_in(tmp_path) == ["1", "2"]


def test_unwritable_storage_is_an_event_and_an_error_until_a_save_succeeds(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.write_text("a file in the way")
    note = Recorder()
    with open_store(directory) as store:
        store.try_save(1, make_state(), note)
        with pytest.raises(
            CheckpointFailed, match=r"step 1: .*Error.*there is none on storage.*launch the job"
        ):
            store.wait_until_saved(note)
        (failed,) = note.of(EventKind.CHECKPOINT_FAILED)
        assert failed["step"] == 1
        assert failed["path"] == str(directory / "1")
        directory.unlink()
        store.try_save(2, make_state(), note)
        store.wait_until_saved(note)
        assert names_in(directory) == ["2"]


def test_the_death_of_the_storage_process_fails_the_save_and_the_next_save_starts_another(tmp_path):
    note = Recorder()
    with open_store(tmp_path) as store:
        store.save(1, make_state(1))
        process = find_storage_process(store)
        os.kill(process, signal.SIGSTOP)
        store.try_save(2, make_state(2), note)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(CheckpointFailed, match=r"ended with code -9.*the newest on storage is of step 1"):
            store.wait_until_saved(note)
        assert len(note.of(EventKind.CHECKPOINT_FAILED)) == 1
        store.try_save(3, make_state(3), note)
        store.wait_until_saved(note)
        assert store.find_newest_step() == 3


def test_a_save_that_exceeds_its_timeout_fails(tmp_path):
    note = Recorder()
    with open_store(tmp_path) as store:
        store.save(1, make_state(1))
        store._client._timeout_s = 0.2
        process = find_storage_process(store)
        os.kill(process, signal.SIGSTOP)
        store.try_save(2, make_state(2), note)
        with pytest.raises(CheckpointFailed, match=r"took more than 0\.2 s"):
            store.wait_until_saved(note)
        assert not Path(f"/proc/{process}").exists()


def test_a_worker_killed_during_a_save_leaves_no_partial_checkpoint_that_counts_and_no_process(tmp_path):
    def kill_a_worker():
        with contextlib.ExitStack() as stack:
            worker = start_worker(stack, "save", tmp_path)
            assert worker.stdout is not None
            writer = int(worker.stdout.readline())
            already = set(names_in(tmp_path))
            wait_until(
                "an unfinished checkpoint",
                lambda: any("tmp" in name for name in set(names_in(tmp_path)) - already),
            )
            worker.kill()
            worker.wait()
            wait_until("the end of the writer", lambda: not Path(f"/proc/{writer}").exists())

    while not any("tmp" in name for name in names_in(tmp_path)):
        kill_a_worker()  # again, if the save ended before the kill
    with open_store(tmp_path) as store:
        wanted = {"a": jax.ShapeDtypeStruct((2_000_000,), np.float32)}
        for step in store.list_directory().steps:
            store.load(step, wanted)
        next_step = max(store.list_directory().steps, default=0) + 1
        store.save(next_step, {"a": jnp.zeros(3)})
        assert store.list_directory().unfinished == ()  # those of dead writers are removed
        assert store.find_newest_step() == next_step


def test_the_unfinished_folder_of_another_live_writer_is_not_removed(tmp_path):
    folder = tmp_path / "4.orbax-checkpoint-tmp-elsewhere-17"
    folder.mkdir()
    with open_store(tmp_path) as store:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            store.save(5, make_state())
            assert folder.exists()
        store.save(6, make_state())
        assert not folder.exists()


def test_an_interrupted_load_does_not_affect_the_next_one(saved):
    with open_store(saved.parent) as store:
        store.load(3, abstract(make_state()))
        process = find_storage_process(store)

        def end_it():
            os.kill(process, signal.SIGSTOP)
            raise KeyboardInterrupt

        os.kill(process, signal.SIGSTOP)
        with pytest.raises(KeyboardInterrupt):
            store.load(3, abstract(make_state()), check=end_it)
        assert not Path(f"/proc/{process}").exists()
        assert to_bytes(store.load(3, abstract(make_state()))) == to_bytes(make_state())


def test_each_host_of_a_sharded_state_reads_only_its_shards_and_never_a_complete_array(tmp_path):
    port, directory = free_port(), tmp_path / "checkpoints"
    with contextlib.ExitStack() as stack:
        workers = [start_worker(stack, "share", directory, index, port) for index in (0, 1)]
        for worker in workers:
            out, err = worker.communicate(timeout=DEADLINE_S)
            assert worker.returncode == 0, err
            assert out.endswith("has its share\n"), err


# Damage.


def data_file(folder):
    """Return the largest file, which contains the arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(folder):
    os.truncate(data_file(folder), data_file(folder).stat().st_size // 2)


def flip_a_bit(folder):
    data = bytearray(data_file(folder).read_bytes())
    data[len(data) // 2] ^= 4
    data_file(folder).write_bytes(data)


def garble_metadata(folder):
    (folder / "default" / "_METADATA").write_bytes(b"\x00garbage{")


def forget_digests(folder):
    (folder / "resilient_jax.sha256").unlink()


DAMAGE = {
    "truncated": (truncate, r"the file .* has the SHA-256"),
    "one bit": (flip_a_bit, r"the file .* has the SHA-256"),
    "a file missing": (lambda folder: data_file(folder).unlink(), r"the file .* is missing"),
    "no metadata": (
        lambda folder: (folder / "default" / "_METADATA").unlink(),
        "it has no default/_METADATA",
    ),
    "garbage as metadata": (garble_metadata, r"the file default/_METADATA .* has the SHA-256"),
    "empty digests": (lambda folder: (folder / "resilient_jax.sha256").write_text(""), "is empty"),
    "garbage as digests": (
        lambda folder: (folder / "resilient_jax.sha256").write_text("what?\n"),
        "has a line",
    ),
    "plain Orbax's, truncated": (
        lambda folder: (forget_digests(folder), truncate(folder)),
        "Orbax cannot read it: ",
    ),
    "plain Orbax's, garbage as metadata": (
        lambda folder: (forget_digests(folder), garble_metadata(folder)),
        "its _METADATA does not describe a tree",
    ),
    "foreign": (
        lambda folder: (shutil.rmtree(folder), folder.mkdir(), (folder / "model.pt").write_bytes(b"PK")),
        "it has no default/_METADATA: it is incomplete, or no checkpoint of Orbax",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a checkpoint of step 3; tests copy it."""
    directory = tmp_path_factory.mktemp("saved")
    with open_store(directory) as store:
        store.save(3, make_state())
    return directory / "3"


class OneHost:
    """A world of one host, or of one among several that cannot read some checkpoints."""

    def __init__(self, others_cannot_read=(), lost=None) -> None:
        self.hosts = ("a", "b") if others_cannot_read else ("a",)
        self.host_index = 0
        self.state_loss = lost
        self.trusted_step = self.replay = self.audits = None
        self.record_event = Recorder()
        self._others_cannot_read = others_cannot_read
        self._newest = None

    def raise_if_ended(self):
        """Return: the generation continues."""

    def all_reduce(self, mine):
        if len(self.hosts) == 1:
            return mine
        if mine.size > 1:  # the newest step found by each host: the other one says the same
            self._newest = msgspec.msgpack.decode(mine[1:].tobytes()[: mine[0]])
            return add_messages(mine, [(1, self._newest)])
        return mine + np.int32(self._newest not in self._others_cannot_read)


def resume(world, store, directory):
    return restore_newest(world, store, rj.Checkpoints(directory=directory), abstract(make_state()), None)


def test_every_damaged_checkpoint_is_skipped_with_its_reason_for_the_newest_intact_one(saved, tmp_path):
    for step, (damage, _) in enumerate(DAMAGE.values(), start=20):
        shutil.copytree(saved, tmp_path / str(step))
        damage(tmp_path / str(step))
    for step in (5, 7):
        shutil.copytree(saved, tmp_path / str(step))
    (tmp_path / "31.orbax-checkpoint-tmp-x").mkdir()
    (tmp_path / "log.jsonl").touch()
    world: Any = OneHost()
    with open_store(tmp_path) as store:
        found = resume(world, store, tmp_path)
        assert found is not None
        assert found[0] == 7
        assert to_bytes(found[1]) == to_bytes(make_state())
        (unfinished, *refused) = world.record_event.of(EventKind.CHECKPOINT_REFUSED)
        assert unfinished["path"] == str(tmp_path / "31.orbax-checkpoint-tmp-x")
        assert [event["step"] for event in refused] == list(reversed(range(20, 20 + len(DAMAGE))))
        for event, (_, reason) in zip(reversed(refused), DAMAGE.values(), strict=True):
            assert event["path"] == str(tmp_path / str(event["step"]))
            assert re.search(reason, event["reason"]), event
        (restored,) = world.record_event.of(EventKind.CHECKPOINT_RESTORED)
        assert restored["step"] == 7


def test_if_no_checkpoint_can_be_read_the_error_gives_each_reason_and_a_remedy(saved, tmp_path):
    for step, damage in ((4, truncate), (6, garble_metadata)):
        shutil.copytree(saved, tmp_path / str(step))
        damage(tmp_path / str(step))
    world: Any = OneHost()
    with (
        open_store(tmp_path) as store,
        pytest.raises(
            CheckpointUnreadable,
            match=rf"found 2 in {tmp_path}, .*step 6: .*step 4: .*Restore one from a copy, or give another",
        ),
    ):
        resume(world, store, tmp_path)


def test_a_checkpoint_that_another_host_cannot_read_is_skipped_here_too(saved, tmp_path):
    for step in (5, 7):
        shutil.copytree(saved, tmp_path / str(step))
    world: Any = OneHost(others_cannot_read=(7,))
    with open_store(tmp_path) as store:
        found = resume(world, store, tmp_path)
    assert found is not None
    assert found[0] == 5
    (refused,) = world.record_event.of(EventKind.CHECKPOINT_REFUSED)
    assert refused["step"] == 7
    assert "another host" in refused["reason"]


@pytest.mark.parametrize("entry", ["_METADATA", "checkpoint-500"])
def test_a_directory_with_other_contents_than_checkpoints_is_refused(entry, tmp_path):
    path = tmp_path / entry
    path.touch() if entry == "_METADATA" else path.mkdir()
    world: Any = OneHost()
    with (
        open_store(tmp_path) as store,
        pytest.raises(StateError, match=rf"found {entry} in .*named by their"),
    ):
        resume(world, store, tmp_path)


def test_without_a_finished_checkpoint_a_job_starts_from_scratch(tmp_path):
    world: Any = OneHost()
    with open_store(tmp_path / "none") as store:
        assert resume(world, store, tmp_path / "none") is None
    assert world.record_event.events == []
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with open_store(tmp_path) as store:
        assert resume(world, store, tmp_path) is None
    assert len(world.record_event.of(EventKind.CHECKPOINT_REFUSED)) == 1


def test_a_job_that_lost_its_state_resumes_and_reports_the_lost_steps_and_the_bytes_read(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "3")
    world: Any = OneHost(lost=StateLoss(step=8, is_lower_bound=False, reason="two hosts", checkpoint_step=3))
    with open_store(tmp_path) as store:
        found = resume(world, store, tmp_path)
    assert found is not None
    (restored,) = world.record_event.of(EventKind.CHECKPOINT_RESTORED)
    assert (restored["step"], restored["steps_lost"]) == (3, 5)
    leaves = [leaf for leaf in jax.tree.leaves(found[1]) if leaf.size]
    raw = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    assert restored["bytes"] == sum(np.asarray(leaf).nbytes for leaf in raw)


def test_a_job_that_was_to_resume_from_a_checkpoint_does_not_start_from_scratch_if_the_checkpoint_is_gone(
    tmp_path,
):
    lost: Any = OneHost(lost=StateLoss(step=8, is_lower_bound=False, reason="two hosts", checkpoint_step=3))
    told_to: Any = OneHost(lost=StateLoss(step=8, is_lower_bound=False, reason="two hosts"))
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointUnreadable, match=rf"found none in {tmp_path}, expected that of step 3"):
            resume(lost, store, tmp_path)
        assert resume(told_to, store, tmp_path) is None


def test_a_save_replaces_a_damaged_checkpoint_of_its_step_and_keeps_an_intact_one(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "3")
    before = (tmp_path / "3" / "default" / "_METADATA").stat().st_mtime_ns
    with open_store(tmp_path) as store:
        note = Recorder()
        store.try_save(3, make_state(), note)
        store.wait_until_saved(note)
        assert note.of(EventKind.CHECKPOINT_SAVED)[0]["existed"]
        assert (tmp_path / "3" / "default" / "_METADATA").stat().st_mtime_ns == before
        flip_a_bit(tmp_path / "3")
        with pytest.raises(CheckpointUnreadable, match="SHA-256"):
            store.load(3, abstract(make_state()))
        store.save(3, make_state())
        assert to_bytes(store.load(3, abstract(make_state()))) == to_bytes(make_state())
        assert names_in(tmp_path) == ["3"]


def test_a_damaged_checkpoint_does_not_count_toward_max_to_keep(saved, tmp_path):
    for step in (1, 5, 9):
        shutil.copytree(saved, tmp_path / str(step))
    for step in (5, 9):
        flip_a_bit(tmp_path / str(step))
    world: Any = OneHost()
    with open_store(tmp_path, max_to_keep=2) as store:
        found = resume(world, store, tmp_path)
        assert found is not None
        assert found[0] == 1
        store.save(6, make_state())
        assert names_in(tmp_path) == ["1", "5", "6", "9"]
        store.save(7, make_state())
        assert names_in(tmp_path) == ["6", "7", "9"]


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_an_invalid_timeout_is_refused(timeout_s, tmp_path):
    with pytest.raises(CallerError, match="timeout_s"):
        rj.Checkpoints(directory=tmp_path, timeout_s=timeout_s)


# Plain Orbax.


def run_plain(script, *arguments):
    """Run a script of plain Orbax in a process that never imports this package; return its output."""
    prelude = "import sys, numpy as np, jax, jax.numpy as jnp, orbax.checkpoint as ocp\n"
    epilogue = "\nassert not any(name.startswith('resilient_jax') for name in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + script + epilogue, *map(str, arguments)],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READ = """
directory, copy = sys.argv[1:]
folder = directory + "/3/default"
trees = [ocp.StandardCheckpointer().restore(folder), ocp.PyTreeCheckpointer().restore(folder)]
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), trees[0])
on_devices = [ocp.StandardCheckpointer().restore(folder, target)]
with ocp.CheckpointManager(directory) as manager:
    assert manager.latest_step() == 3
    trees.append(manager.restore(3))
    on_devices.append(manager.restore(3, args=ocp.args.StandardRestore(target)))
assert all(isinstance(tree["variables"]["wide"], jax.Array) for tree in on_devices)
for tree in trees + on_devices:
    assert tree["optimizer"][2] is None and tree["patience"] == () and tree["variables"]["nothing"] == {}
    assert tree["variables"]["int4"].dtype == jnp.int4
    leaves = jax.tree.leaves_with_path(tree)
    raw = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    np.savez(copy, **{name: np.frombuffer(np.asarray(leaf).tobytes(), np.uint8) for name, leaf in raw.items()})
    with np.load(copy) as file:
        print(sorted((name, file[name].tobytes().hex()[:64], len(file[name])) for name in file))
"""


def test_plain_orbax_restores_our_checkpoints_and_sha256sum_verifies_them(saved, tmp_path):
    first, *others = run_plain(READ, saved.parent, tmp_path / "copy.npz").splitlines()
    assert len(others) == 4
    assert all(other == first for other in others)
    state = make_state()
    variables = {**state.variables, "key": jax.random.key_data(state.variables["key"])}
    leaves = jax.tree_util.tree_leaves_with_path(state._replace(variables=variables))
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf).tobytes()
        for path, leaf in leaves
        if leaf.size
    }
    assert first == str(sorted((name, data.hex()[:64], len(data)) for name, data in expected.items()))
    subprocess.run(["sha256sum", "--check", "--strict", "resilient_jax.sha256"], cwd=saved, check=True)


REWRITE = """
ours, theirs = sys.argv[1:]
tree = ocp.CheckpointManager(ours).restore(3)
tree["variables"]["key"] = jax.random.wrap_key_data(jnp.asarray(tree["variables"]["key"]))
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(theirs + "/1/default", tree)
ocp.PyTreeCheckpointer().save(theirs + "/2/default", {**tree, "step": int(tree["step"])})
with ocp.CheckpointManager(theirs) as manager:
    manager.save(4, args=ocp.args.StandardSave(jax.tree.map(jnp.asarray, tree)))
"""


def test_checkpoints_of_plain_orbax_are_restored(saved, tmp_path):
    run_plain(REWRITE, saved.parent, tmp_path)
    state = make_state()
    with open_store(tmp_path) as store:
        assert store.list_directory().steps == (4, 2, 1)
        for step in (4, 1):
            assert to_bytes(store.load(step, abstract(state))) == to_bytes(state)
        with pytest.raises(StateError, match=r"int64\[\] at step instead of int32\[\]"):
            store.load(2, abstract(state))  # Orbax stores a Python int as int64


HANDED_OVER = """
ours, theirs = sys.argv[1:]
state = jax.tree.map(jnp.asarray, ocp.CheckpointManager(ours).restore(2))
with ocp.CheckpointManager(theirs) as manager:
    manager.save(2, args=ocp.args.StandardSave(state))
"""


def test_a_trainer_resumes_from_a_checkpoint_of_plain_orbax(tmp_path):
    rows = [{"x": np.array([i, 1, -i], np.float32)} for i in range(8)]

    def train(steps, directory=None):
        return rj.Trainer(
            model=lambda key: {"w": jax.random.normal(key, (3,))},
            optimizer=optax.adam(0.1),
            loss_fn=lambda model, batch: jnp.mean((batch["x"] @ model["w"] - 1) ** 2),
            data=rows,
            batch_size=4,
            microbatch_size=2,
            checkpoints=rj.Checkpoints(directory=directory, interval_steps=2)
            if directory is not None
            else None,
        ).fit(steps)

    train(2, tmp_path / "ours")
    run_plain(HANDED_OVER, tmp_path / "ours", tmp_path / "theirs")
    steps_before = (tmp_path / "theirs" / "2" / "default" / "_METADATA").stat().st_mtime_ns
    assert train(4, tmp_path / "theirs").params_sha256 == train(4).params_sha256
    assert names_in(tmp_path / "theirs") == ["2", "4"]
    assert (tmp_path / "theirs" / "2" / "default" / "_METADATA").stat().st_mtime_ns == steps_before


def test_the_death_of_an_idle_storage_process_loses_no_checkpoint(tmp_path):
    def kill_idle(store):
        os.kill(find_storage_process(store), signal.SIGKILL)
        wait_until("the end of the connection", lambda: store._client._connection.has_ended)

    with open_store(tmp_path) as store:
        store.save(1, make_state(1))
        kill_idle(store)
        store.save(2, make_state(2))
        kill_idle(store)
        assert to_bytes(store.load(2, abstract(make_state(2)))) == to_bytes(make_state(2))


def make_small_trainer(directory, **options):
    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    return rj.Trainer(
        model=lambda key: {"w": jax.random.normal(key, (3, 1))},
        optimizer=optax.sgd(0.1),
        loss_fn=lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        data=rows,
        batch_size=8,
        microbatch_size=4,
        checkpoints=rj.Checkpoints(directory=directory),
        **options,
    )


def test_a_model_whose_last_checkpoint_fails_is_in_the_result(tmp_path, caplog):
    directory = tmp_path / "checkpoints"

    def break_storage(report):
        if report.step == 4:
            shutil.rmtree(directory)
            directory.write_text("in the way")

    directory.mkdir()
    result = make_small_trainer(directory, callbacks=[break_storage]).fit(5)
    assert (result.step, result.checkpoint_directory) == (5, None)
    assert "the last save failed" in result.checkpoint_failure
    assert "the trained model is not on storage" in caplog.text
    assert result.params_sha256 == make_small_trainer(tmp_path / "whole").fit(5).params_sha256


def test_a_last_checkpoint_that_fails_once_is_made_again(tmp_path):
    directory = tmp_path / "checkpoints"
    directory.mkdir()

    def break_storage(report):
        if report.step == 5:
            shutil.rmtree(directory, ignore_errors=True)

    result = make_small_trainer(directory, callbacks=[break_storage]).fit(5)
    assert (result.checkpoint_directory, result.checkpoint_failure) == (directory, "")
    with open_store(directory) as store:
        assert store.find_newest_step() == 5


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_place_of_the_directory_is_refused_before_training(tmp_path, below):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CallerError, match=r"directory=.*where .*/file is a file, expected a directory"):
        rj.Checkpoints(directory=file / below)


@pytest.mark.parametrize("kind", [str, Path])
def test_the_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_small_trainer(kind("~/checkpoints"), log_directory=kind("~/logs")).fit(1)
    assert names_in(tmp_path) == ["checkpoints", "logs"]
    assert names_in(tmp_path / "checkpoints") == ["1"]


def test_the_final_state_is_saved_although_no_checkpoint_was_due(tmp_path):
    trainer = make_small_trainer(tmp_path, callbacks=[lambda report: report.step == 5])
    assert trainer.fit(50).step == 5
    with open_store(tmp_path) as store:
        assert store.find_newest_step() == 5
