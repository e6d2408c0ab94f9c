"""Checkpoints have the layout of Orbax's CheckpointManager, in both directions; another layout is refused in words."""

import json
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from resilient_jax.checkpoint.directory_listing import find_tree_folder, list_directory
from resilient_jax.checkpoint.orbax_reader import inspect_checkpoint, read_boxes
from resilient_jax.checkpoint.orbax_writer import remove_old_checkpoints
from resilient_jax.checkpoint.stored_tree import StoredBox, flatten_tree
from resilient_jax.errors import CheckpointFailed, CheckpointUnreadable, StateError
from resilient_jax.state.index_box import whole_box
from tests.support.whole_checkpoints import write_whole

TREE = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "opt_state": [np.array(3, np.int32), None],
    "half": np.asarray(jnp.asarray([0.5, 2.0], jnp.bfloat16)),
    "none": {},
}


def make_abstract():
    """Return the shapes of the tree, on this process's device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), TREE)


def assert_equal(found):
    assert jax.tree.structure(found) == jax.tree.structure(TREE)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(TREE), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Return a directory with our checkpoint of step 3, and the folder of a save that was not finished."""
    directory = tmp_path_factory.mktemp("ours")
    write_whole(directory, 3, TREE)
    (directory / "5.orbax-checkpoint-tmp-host-17").mkdir()
    return directory


def test_the_files_of_a_checkpoint_are_those_of_a_checkpoint_manager(ours, tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(TREE))
    names = {path.name for path in (ours / "3").iterdir()}
    assert names == {path.name for path in (tmp_path / "3").iterdir()} | {"resilient_jax.sha256"}
    mine, theirs = (json.loads((at / "3" / "_CHECKPOINT_METADATA").read_text()) for at in (ours, tmp_path))
    assert mine["item_handlers"] == theirs["item_handlers"]


def test_a_plain_checkpoint_manager_finds_and_restores_our_steps(ours):
    with ocp.CheckpointManager(ours) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([3], 3)
        assert_equal(manager.restore(3))
        assert_equal(manager.restore(3, args=ocp.args.StandardRestore()))
        placed = manager.restore(3, args=ocp.args.StandardRestore(make_abstract()))
    assert_equal(placed)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))


def test_a_standard_checkpointer_restores_the_item_of_our_step(ours):
    with ocp.StandardCheckpointer() as checkpointer:
        assert_equal(checkpointer.restore(ours / "3" / "default"))
        assert_equal(checkpointer.restore(ours / "3" / "default", make_abstract()))


def test_a_checkpoint_manager_and_ours_keep_house_in_one_directory(tmp_path):
    write_whole(tmp_path, 3, TREE)
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in (4, 5):
            manager.save(step, args=ocp.args.StandardSave(TREE))
    assert list_directory(tmp_path).steps == (5, 4)
    write_whole(tmp_path, 6, TREE)
    remove_old_checkpoints(tmp_path, 6, 2, ())
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [5, 6]
        assert_equal(manager.restore(6))


def test_we_read_what_a_plain_checkpoint_manager_saved(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(TREE))
    arrays, is_verified = inspect_checkpoint(tmp_path / "3")
    assert not is_verified
    assert {spec.path for spec in arrays} == {"params/w", "opt_state/0", "half"}
    (wanted,) = (spec for spec in arrays if spec.path == "params/w")
    memory = mmap.mmap(-1, TREE["params"]["w"].nbytes)
    read_boxes(tmp_path / "3", [StoredBox(spec=wanted, box=whole_box(wanted.shape), offset=0)], memory)
    assert memory[:] == TREE["params"]["w"].tobytes()


def save_in_the_folder_itself(folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, TREE)


def save_named_items(folder):
    with ocp.CheckpointManager(folder.parent) as manager:
        state = ocp.args.StandardSave(TREE["params"])
        manager.save(int(folder.name), args=ocp.args.Composite(params=state, averages=state))


OTHER_LAYOUTS = {
    "in the folder itself": (
        save_in_the_folder_itself,
        r"its tree is in the folder itself, as StandardCheckpointer .* expected it in default/.* Move all",
    ),
    "named items": (
        save_named_items,
        r"it has the items averages, params, expected one item, default\. Save the whole state with",
    ),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_another_layout_is_refused_with_the_remedy_and_neither_replaced_nor_removed(layout, tmp_path):
    save, said = OTHER_LAYOUTS[layout]
    folder = tmp_path / "3"
    save(folder)
    files = sorted(folder.rglob("*"))
    assert find_tree_folder(folder) is None
    with pytest.raises(CheckpointUnreadable, match=said):
        inspect_checkpoint(folder)
    with pytest.raises(CheckpointFailed, match=rf"another checkpoint is in the way in {folder}: {said}"):
        write_whole(tmp_path, 3, TREE)
    for step in (4, 5):
        write_whole(tmp_path, step, TREE)
        remove_old_checkpoints(tmp_path, step, 1, ())
    assert list_directory(tmp_path).steps == (5, 3)
    assert sorted(folder.rglob("*")) == files


def test_the_remedy_for_a_tree_in_the_folder_itself_works(tmp_path):
    save_in_the_folder_itself(tmp_path / "3")
    (tmp_path / "3").rename(tmp_path / "moved")
    (tmp_path / "3").mkdir()
    (tmp_path / "moved").rename(tmp_path / "3" / "default")
    assert {spec.path for spec in inspect_checkpoint(tmp_path / "3")[0]} == {
        "params/w",
        "opt_state/0",
        "half",
    }


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a.b": 1, "a": {"b": 2}}, r"\['a'\]\['b'\] and \['a.b'\], which storage has as one, named 'a.b'"),
        ({"x": [1, 2], "x.0": 3}, r"\['x'\]\[0\] and \['x.0'\]"),
        ({"a.b": {}, "a": {"b": None}}, r"\['a'\]\['b'\] and \['a.b'\]"),
    ],
)
def test_two_leaves_with_one_name_on_storage_are_refused_by_both_paths(tree, said):
    with pytest.raises(StateError, match=rf"found the leaves {said}.*Rename a key with a dot"):
        flatten_tree(tree)


def test_leaves_whose_names_have_dots_are_stored_under_names_of_their_own():
    assert len(flatten_tree({"a.b": 1, "a": {"c": 2}, "b": [3, {"0": 4}], "b/0": 5})) == 5
