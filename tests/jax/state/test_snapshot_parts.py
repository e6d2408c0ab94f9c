"""The partition of a state: every element once, equal parts, and the same result on every host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError, StateError
from resilient_jax.snapshot.manifest import SLICE_ALIGNMENT
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.index_box import IndexBox, contiguous_runs, whole_box
from resilient_jax.state.snapshot_interval import compute_interval_steps, compute_optimal_interval_s
from resilient_jax.state.state_partition import check_same_structure, partition_state
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import host_names, hosts_of_eight, put, shapes, shardings, states, values

host_counts = st.sampled_from([1, 2, 4, 8])


def size_of(piece, leaves):
    return IndexBox(piece.start, piece.stop).size * leaves[piece.leaf].value.dtype.itemsize


def padded(size):
    return -(-size // SLICE_ALIGNMENT) * SLICE_ALIGNMENT


@given(st.data(), host_counts)
def test_the_slices_of_all_hosts_cover_every_leaf_exactly_once(data, count):
    leaves = flatten_state(1, data.draw(states())).leaves
    hosts, host_of = hosts_of_eight(count)
    state_cut = partition_state(leaves, host_of, hosts)
    covered = [np.zeros(leaf.value.shape, int) for leaf in leaves]
    for host in hosts:
        stop = 0
        for piece in state_cut.slices[host]:
            assert piece.offset == padded(stop)
            stop = piece.offset + size_of(piece, leaves)
            covered[piece.leaf][
                IndexBox(piece.start, piece.stop).index_within(whole_box(covered[piece.leaf].shape))
            ] += 1
        assert state_cut.part_bytes[host] == padded(stop)
    assert all((count == 1).all() for count in covered)


@given(st.data(), host_counts)
def test_a_host_keeps_only_elements_that_are_on_its_devices(data, count):
    shape = data.draw(shapes)
    leaf = put(values(shape, "float32", 0), data.draw(shardings(shape)))
    hosts, host_of = hosts_of_eight(count)
    if len({host_of(device) for device in leaf.sharding.device_set}) == 1:
        return  # such a leaf is assumed to be on every host
    state_cut = partition_state(flatten_state(1, [leaf]).leaves, host_of, hosts)
    for host in hosts:
        held = np.zeros(shape, bool)
        for shard in leaf.addressable_shards:
            held[shard.index] |= host_of(shard.device) == host
        for piece in state_cut.slices[host]:
            assert held[IndexBox(piece.start, piece.stop).index_within(whole_box(shape))].all()


@given(st.lists(shapes, max_size=8), st.data(), host_counts)
def test_hosts_with_the_same_shards_get_equal_parts_to_within_a_row(leaf_shapes, data, count):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    dtype = st.sampled_from(["float32", "bool", "bfloat16"])
    state = [put(values(s, data.draw(dtype), 0), NamedSharding(mesh, P())) for s in leaf_shapes]
    leaves = flatten_state(1, state).leaves
    hosts, host_of = hosts_of_eight(count)
    state_cut = partition_state(leaves, host_of, hosts)
    row = 0
    for number, leaf in enumerate(leaves):
        boxes = [p for host in hosts for p in state_cut.slices[host] if p.leaf == number]
        sizes = [size_of(piece, leaves) for piece in boxes]
        if not sizes:
            continue
        cut_dims = [
            d for d, n in enumerate(leaf.value.shape) if {p.stop[d] - p.start[d] for p in boxes} != {n}
        ]
        assert len(cut_dims) <= 1
        row_bytes = leaf.value.nbytes // leaf.value.shape[cut_dims[0]] if cut_dims else leaf.value.nbytes
        assert max(sizes) - min(sizes) <= row_bytes
        assert max(sizes) <= -(-leaf.value.nbytes // count) + row_bytes
        row = max(row, padded(row_bytes))
    parts = state_cut.part_bytes.values()
    assert max(parts) - min(parts) <= row


def test_the_remainders_of_many_leaves_are_balanced_over_hosts():
    hosts, host_of = hosts_of_eight(4)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    state = [put(np.zeros((5, 64), np.float32), sharding) for _ in range(40)]
    parts = partition_state(flatten_state(1, state).leaves, host_of, hosts).part_bytes
    assert set(parts.values()) == {40 * 5 * 256 // 4}


def test_a_replicated_leaf_is_split_along_its_first_long_dim():
    hosts, host_of = hosts_of_eight(8)
    leaves = flatten_state(1, {"layers": np.zeros((2, 800, 300), np.float32)}).leaves
    state_cut = partition_state(leaves, host_of, hosts)
    assert [state_cut.slices[host][0].start for host in hosts] == [(0, 100 * i, 0) for i in range(8)]


def test_a_partition_lists_the_hosts_that_have_every_leaf():
    hosts, host_of = hosts_of_eight(4)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "shard"))

    def place(*spec):
        return put(np.zeros((8, 8), np.float32), NamedSharding(mesh, P(*spec)))

    local = put(np.zeros(8, np.float32), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x")))

    def complete_on(*state):
        return partition_state(flatten_state(1, list(state)).leaves, host_of, hosts).replicated_on

    # Each host has two devices and each replica four shards, so a host has half a replica.
    for somewhere_cut in (place("shard"), place(("replica", "shard"))):
        assert complete_on(somewhere_cut) == complete_on(place(), somewhere_cut) == ()
    on_each = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("host", "local")), P("local"))
    for here in (place(), np.zeros(3, np.float32), local, put(np.zeros(8, np.float32), on_each)):
        assert complete_on(here) == tuple(hosts)
    some = put(np.zeros(8, np.float32), NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P()))
    others = put(np.zeros(8, np.float32), NamedSharding(Mesh(np.array(jax.devices()[4:]), ("x",)), P()))
    assert (complete_on(some, local), complete_on(some, others)) == (tuple(hosts[:2]), ())


def test_the_partition_follows_from_shardings_alone():
    hosts, host_of = hosts_of_eight(4)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    cuts = [
        partition_state(
            flatten_state(1, {"w": put(values((16, 3), "float32", seed), sharding)}).leaves, host_of, hosts
        )
        for seed in (1, 2)
    ]
    assert cuts[0] == cuts[1]


def test_random_keys_are_stored_as_raw_data_with_their_implementation():
    hosts, host_of = hosts_of_eight(2)
    state_cut = partition_state(
        flatten_state(1, {"key": jax.random.key(1, impl="rbg")}).leaves, host_of, hosts
    )
    (info,) = state_cut.leaves
    assert (info.dtype, info.shape, info.key_impl) == ("uint32", (4,), "rbg")


def test_a_state_on_a_dead_hosts_devices_is_refused():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    leaves = flatten_state(1, {"w": put(np.zeros(8, np.float32), sharding)}).leaves
    _, host_of = hosts_of_eight(4)
    with pytest.raises(StateError, match=r"leaf \['w'\] is on devices of \['host-3'\], expected only live"):
        partition_state(leaves, host_of, host_names(3))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"a": jnp.zeros(3), "b": jnp.zeros(2)},
            r"found \['a'\] of float32\[3\], expected \['a'\] of float32\[2\]",
        ),
        ({"a": jnp.zeros(2)}, r"found no leaf, expected \['b'\]"),
        ({"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(1)}, r"found \['c'\].*, expected no leaf"),
        ({"a": jnp.zeros(2, "bfloat16"), "b": jnp.zeros(2)}, r"found \['a'\] of bfloat16\[2\]"),
    ],
)
def test_a_state_of_another_structure_is_refused_and_its_first_leaf_is_named(other, words):
    state_cut = partition_state(
        flatten_state(1, {"a": jnp.zeros(2), "b": jnp.zeros(2)}).leaves, hosts_of_eight(1)[1], host_names(1)
    )
    with pytest.raises(StateError, match=words):
        check_same_structure(state_cut, flatten_state(2, other).leaves)


@given(shapes, st.integers(1, 200))
def test_runs_cover_a_box_in_order(shape, limit):
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    box = whole_box(shape)
    found = [numbers[(*run.index_within(box), ...)].reshape(-1) for run in contiguous_runs(box, 4, limit)]
    assert all(len(run) * 4 <= max(limit, 4) for run in found)
    assert np.array_equal(np.concatenate([*found, np.zeros(0, int)]), np.arange(numbers.size))


def test_the_interval_is_that_of_young():
    assert compute_optimal_interval_s(0.5, 3600.0) == 60.0
    assert compute_interval_steps(0.5, 3600.0, 2.0, copy_s=1) == 30


def test_free_snapshots_are_taken_at_every_step():
    assert compute_interval_steps(0, 100, 0.5, copy_s=0.1) == 1


def test_an_interval_is_long_enough_for_the_copy():
    assert compute_interval_steps(0.001, 10, 1.0, copy_s=9.5) == 10


def test_the_interval_never_exceeds_the_time_between_failures():
    assert compute_optimal_interval_s(1000, 10) == 10


@given(st.floats(0.001, 10), st.floats(100, 1e6))
def test_no_other_interval_loses_less_time(cost_s, failure_s):
    def lost(interval_s):
        return cost_s / interval_s + interval_s / (2 * failure_s)

    best_s = compute_optimal_interval_s(cost_s, failure_s)
    assert all(lost(best_s) <= lost(best_s * factor) * (1 + 1e-9) for factor in (0.5, 0.9, 1.1, 2))


@pytest.mark.parametrize("numbers", [(-1, 1), (1, 0), (float("nan"), 1), (1, float("inf"))])
def test_costs_and_failure_times_out_of_range_are_refused(numbers):
    with pytest.raises(CallerError, match="snapshot interval: found a cost of"):
        compute_optimal_interval_s(*numbers)


@pytest.mark.parametrize(("step_s", "copy_s"), [(0, 1), (1, -1), (float("nan"), 1)])
def test_step_and_copy_durations_out_of_range_are_refused(step_s, copy_s):
    with pytest.raises(CallerError, match="snapshot interval: found steps of"):
        compute_interval_steps(1, 1, step_s, copy_s=copy_s)
