"""A state is restored bit for bit, on any mesh, and shares no memory with the snapshot that it was read from."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import MessageError, StateError
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.snapshot.manifest import PartManifest
from resilient_jax.snapshot.stripes import MAX_BLOCK_BYTES
from resilient_jax.state import box_reads, restore
from resilient_jax.state.box_reads import BoxGatherer, ReadTarget
from resilient_jax.state.flat_state import copy_to_host, flatten_state, make_abstract_state
from resilient_jax.state.index_box import whole_box
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.state_placement import restore_state as restore_held
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import (
    DTYPES,
    abstract_of,
    assert_same,
    hosts_of_eight,
    plain,
    put,
    shapes,
    shardings,
    states,
    take,
    values,
)

host_counts = st.sampled_from([1, 2, 4, 8])


def take_by(count, state, **options):
    hosts, host_of = hosts_of_eight(count)
    return take(state, hosts, host_of, **options)[0]


@given(st.data(), host_counts)
def test_a_state_is_restored_bit_for_bit_on_another_random_mesh(data, count):
    state = data.draw(states())
    snapshot = take_by(count, state)
    targets = {f"['{name}']": data.draw(shardings(leaf.shape)) for name, leaf in state.items()}
    step, restored = restore_snapshot(abstract_of(state), snapshot, lambda path, leaf: targets[path])
    assert step == 3
    snapshot.overwrite()
    assert_same(restored, state)
    for name, leaf in restored.items():
        if isinstance(leaf, jax.Array):
            assert leaf.sharding == targets[f"['{name}']"]
        else:
            assert isinstance(state[name], np.ndarray), "what was committed in host memory comes back there"


def all_dtypes():
    state = {
        dtype: put(values((8, 6), dtype, 1), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        for dtype in DTYPES
    }
    mesh = Mesh(np.array(jax.devices()), ("x",))
    keys = jax.random.split(jax.random.key(5), 8)
    return state | {
        "float8_e5m2": jnp.arange(7.0).astype(jnp.float8_e5m2),
        "scalar": jnp.float32(2.5),
        "count": 7,
        "rate": 0.5,
        "flag": True,
        "numpy": np.arange(5, dtype=np.float32),
        "numpy_scalar": np.float16(1.5),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(7),
        "keys": jax.device_put(keys, NamedSharding(mesh, P("x"))),
        "rbg": jax.random.key(9, impl="rbg"),
        "nested": ({"a": jnp.int32(2)}, [jnp.uint8(3), None]),
    }


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_kind_of_leaf_is_restored(count):
    state = all_dtypes()
    snapshot = take_by(count, state)
    _, restored = restore_snapshot(abstract_of(state), snapshot, None)
    snapshot.overwrite()
    expected = restore_held(abstract_of(state), copy_to_host(flatten_state(3, state)), None)
    assert_same(restored, expected)
    arrays = [leaf for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array)]
    assert len(arrays) == len(jax.tree.leaves(restored)) - 5
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in arrays)


def test_restored_random_keys_have_the_requested_sharding_and_draw_the_same():
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), P("x"))
    keys = jax.random.split(jax.random.key(5), 8)
    snapshot = take_by(4, {"keys": jax.device_put(keys, NamedSharding(sharding.mesh, P(("x", "y"))))})
    _, restored = restore_snapshot(jax.eval_shape(lambda: {"keys": keys}), snapshot, sharding)
    assert restored["keys"].sharding == sharding
    draw = jax.vmap(lambda key: jax.random.normal(key, (3,)))
    assert np.array_equal(draw(restored["keys"]), draw(keys))


def test_restored_arrays_do_not_change_when_the_next_snapshot_is_written():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    state = {"w": put(values((64, 1000), "float32", 1), sharding), "b": jnp.ones(100_000)}
    snapshot = take_by(4, state)
    _, restored = restore_snapshot(
        abstract_of(state), snapshot, lambda p, leaf: NamedSharding(sharding.mesh, P())
    )
    before = [plain(leaf) for leaf in jax.tree.leaves(restored)]
    snapshot.overwrite()
    assert [plain(leaf) for leaf in jax.tree.leaves(restored)] == before
    views = [np.frombuffer(part, np.uint8) for part in snapshot.parts.values()]
    for leaf in jax.tree.leaves(restored):
        for shard in leaf.addressable_shards:
            assert not any(np.shares_memory(np.asarray(shard.data), view) for view in views)


def test_donating_a_restored_array_changes_no_other_array():
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    state = {"w": put(values((100, 64), "float32", 1), everywhere)}
    snapshot = take_by(2, state)
    _, restored = restore_snapshot(abstract_of(state), snapshot, everywhere)
    shards = [shard.data for shard in restored["w"].addressable_shards]
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    ends = [jax.block_until_ready(overwrite(shards[device])) for device in (0, 3)]
    assert all((np.asarray(end) == -1).all() for end in ends)
    for device in (1, 2, 4, 5, 6, 7):
        assert plain(shards[device]) == plain(state["w"])


def test_a_box_that_several_devices_need_is_read_once():
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    state = {"w": put(values((100, 64), "float32", 1), everywhere)}
    snapshot = take_by(4, state)
    restore_snapshot(abstract_of(state), snapshot, everywhere)
    assert snapshot.bytes_read == 100 * 64 * 4


def test_only_the_requested_box_is_read():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    state = {"w": put(values((64, 2**16), "float32", 1), NamedSharding(mesh, P("x")))}
    snapshot = take_by(8, state)
    box = whole_box((64, 2**16)).narrow(0, 16, 32)
    data = np.empty(box.shape, np.float32)
    BoxGatherer(snapshot).gather([ReadTarget(0, box, data)])
    assert np.array_equal(data, np.asarray(state["w"])[16:32])
    assert (snapshot.bytes_read, snapshot.reads) == (data.nbytes, 1)


def test_columns_of_long_rows_are_read_without_the_gaps_between_them():
    state = {"w": put(values((8, 2**18), "float32", 1), jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    snapshot = take_by(1, state)
    box = whole_box((8, 2**18)).narrow(1, 1000, 2000)
    data = np.empty(box.shape, np.float32)
    BoxGatherer(snapshot).gather([ReadTarget(0, box, data)])
    assert np.array_equal(data, np.asarray(state["w"])[:, 1000:2000])
    assert (snapshot.bytes_read, snapshot.reads) == (8 * MAX_BLOCK_BYTES, 8)


def test_many_small_leaves_take_few_reads():
    state = {f"leaf{i}": jnp.full((10,), i, jnp.float32) for i in range(200)}
    snapshot = take_by(4, state)
    _, restored = restore_snapshot(abstract_of(state), snapshot, None)
    assert_same(restored, state)
    assert snapshot.reads == 4, "one for each host"


@given(st.data(), host_counts, st.sampled_from([1, 16, 100]), st.sampled_from([0, 8, 100]))
def test_reads_of_any_size_restore_the_same_state(data, count, read_bytes, gap_bytes):
    shape = data.draw(shapes)
    state = {
        "w": put(values(shape, "bfloat16", 1), data.draw(shardings(shape))),
        "v": values(shape, "int32", 2),
    }
    snapshot = take_by(count, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_reads, "MAX_READ_BYTES", read_bytes)
        patch.setattr(box_reads, "MAX_GAP_BYTES", gap_bytes)
        patch.setattr(restore, "RESTORE_BATCH_BYTES", read_bytes)
        target = data.draw(shardings(shape))
        _, restored = restore_snapshot(abstract_of(state), snapshot, target)
    assert_same(restored, state)


def test_strings_are_restored_with_the_arrays_and_the_step():
    state = {"name": "byte_lm", "w": jnp.ones(4), "nested": ["a", jnp.zeros(2)]}
    snapshot = take_by(2, state, step=12)
    places = []

    def init():
        return {"name": "", "w": jnp.zeros(4), "nested": ["", jnp.ones(2)]}

    step, restored = restore_snapshot(
        make_abstract_state(init), snapshot, None, failpoint=lambda place, step: places.append((place, step))
    )
    assert step == 12
    assert [restored["name"], restored["nested"][0]] == ["byte_lm", "a"]
    assert_same([restored["w"], restored["nested"][1]], [state["w"], state["nested"][1]])
    assert places == [(FailPoint.DURING_RESTORE, 12)]


def test_a_state_without_leaves_is_restored():
    assert restore_snapshot({}, take_by(2, {}), None) == (3, {})


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (
            lambda: {"x": jnp.ones(3)},
            r"the snapshot: found float32\[2\] at \['x'\] instead of float32\[3\], expected the state",
        ),
        (lambda: {"x": jnp.ones(2, "bfloat16")}, r"float32\[2\] at \['x'\] instead of bfloat16\[2\]"),
        (lambda: {"x": jnp.ones(2), "new": 1.0}, r"found no \['new'\], expected"),
        (
            lambda: {"x": jax.random.key(1)},
            r"float32\[2\] at \['x'\] instead of uint32\[2\] \(data of a threefry2x32 key\)",
        ),
    ],
)
def test_a_mismatch_with_the_init_function_is_refused_like_that_of_a_committed_state(init, words):
    state = {"x": jnp.ones(2)}
    snapshot = take_by(2, state)
    with pytest.raises(StateError, match=words) as from_snapshot:
        restore_snapshot(jax.eval_shape(init), snapshot, None)
    with pytest.raises(StateError) as from_flat:
        restore_held(jax.eval_shape(init), flatten_state(3, state), None)
    assert str(from_snapshot.value) == str(from_flat.value).replace("the committed state", "the snapshot", 1)


def test_a_random_key_is_restored_only_as_a_key_of_the_same_implementation():
    snapshot = take_by(1, {"x": jax.random.key(1)})
    with pytest.raises(
        StateError, match=r"uint32\[2\] \(data of a threefry2x32 key\) at .* instead of uint32\[2\], expected"
    ):
        restore_snapshot(jax.eval_shape(lambda: {"x": jnp.zeros(2, "uint32")}), snapshot, None)
    with pytest.raises(
        StateError, match=r"\(data of a threefry2x32 key\) at .* instead of uint32\[4\] \(data of a rbg key\)"
    ):
        restore_snapshot(jax.eval_shape(lambda: {"x": jax.random.key(1, impl="rbg")}), snapshot, None)


def change(snapshot, host, **fields):
    snapshot.done[host] = msgspec.structs.replace(snapshot.done[host], **fields)


def test_parts_of_different_snapshots_are_not_mixed():
    snapshot = take_by(2, {"w": jnp.ones(4)})
    hosts, _ = hosts_of_eight(2)
    change(snapshot, hosts[1], id=msgspec.structs.replace(snapshot.done[hosts[1]].id, step=2))
    with pytest.raises(
        MessageError, match=r"host-1 has a part of snapshot .*step=2.*expected parts of one state"
    ):
        restore_snapshot(jax.eval_shape(lambda: {"w": jnp.ones(4)}), snapshot, None)


@pytest.mark.parametrize(("pieces", "found"), [(lambda pieces: (), 2), (lambda pieces: pieces * 2, 6)])
def test_parts_that_lack_or_repeat_elements_are_refused(pieces, found):
    snapshot = take_by(2, {"w": jnp.ones(4)})
    hosts, _ = hosts_of_eight(2)
    manifest: PartManifest = snapshot.done[hosts[1]]
    contents = msgspec.structs.replace(manifest.contents, slices=pieces(manifest.contents.slices))
    change(snapshot, hosts[1], contents=contents)
    with pytest.raises(
        MessageError, match=rf"have {found} of the 4 elements of leaf \['w'\] from \[0\] to \[4\]"
    ):
        restore_snapshot(jax.eval_shape(lambda: {"w": jnp.ones(4)}), snapshot, None)


def test_a_dtype_that_numpy_lacks_here_is_refused():
    snapshot = take_by(1, {"w": jnp.ones(4)})
    (host,) = snapshot.done
    contents = snapshot.done[host].contents
    leaves = (msgspec.structs.replace(contents.leaves[0], dtype="posit16"),)
    change(snapshot, host, contents=msgspec.structs.replace(contents, leaves=leaves))
    with pytest.raises(StateError, match=r"leaf \['w'\] is of dtype 'posit16'"):
        restore_snapshot(jax.eval_shape(lambda: {"w": jnp.ones(4)}), snapshot, None)
