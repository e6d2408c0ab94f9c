"""Each leaf comes back of the kind, type, width and weak type that it had, on every way back; or it is refused."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import StateError
from resilient_jax.state.flat_state import copy_to_host, flatten_state, make_abstract_state
from resilient_jax.state.leaf_kinds import make_strong
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.state_digest import digest_state
from resilient_jax.state.state_partition import check_same_structure, partition_state
from resilient_jax.state.state_placement import place_initial_state, place_placeholder_state
from resilient_jax.worker.committed_state import CommittedState
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import hosts_of_eight, take
from tests.support.leaf_kinds import assert_same_kinds, describe, make_state
from tests.support.standalone_world import make_world

WIDTHS = pytest.mark.parametrize("x64", [False, True], ids=["x64 off", "x64 on"])


def replicated():
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())


def by_first_dim(path, leaf):
    """Shard what eight devices divide."""
    return NamedSharding(replicated().mesh, P("x") if leaf.shape[:1] == (8,) else P())


def keep(state):
    """Return what outlives a generation that committed the state in its first step."""
    committed = CommittedState()
    world = make_world(committed=committed)
    world.restore_or_init(lambda: state)
    for _ in world.steps(1):
        world.commit(state)
    return committed


def restore(committed, init, sharding=None):
    return make_world(committed=committed).restore_or_init(init, sharding)


def from_devices(state, sharding):
    return restore(keep(state), lambda: state, sharding)


def from_host_memory(state, sharding):
    committed = keep(state)
    assert committed.state is not None
    committed.state = copy_to_host(committed.state)
    return restore(committed, lambda: state, sharding)


def from_snapshot(count, state, sharding):
    hosts, host_of = hosts_of_eight(count)
    snapshot, _ = take(state, hosts, host_of)
    _, restored = restore_snapshot(make_abstract_state(lambda: state), snapshot, sharding)
    snapshot.overwrite()
    return restored


WAYS = {
    "from devices": from_devices,
    "from host memory": from_host_memory,
    "from a snapshot of one host": functools.partial(from_snapshot, 1),
    "from a snapshot of four hosts": functools.partial(from_snapshot, 4),
}


@WIDTHS
def test_what_init_makes_is_returned_as_it_was_made(x64):
    with jax.enable_x64(x64):
        state = make_state()
        assert_same_kinds(restore(CommittedState(), lambda: state), state)


@WIDTHS
@pytest.mark.parametrize("rule", [None, replicated, by_first_dim], ids=["kept", "replicated", "sharded"])
@pytest.mark.parametrize("way", WAYS)
def test_what_was_committed_comes_back_as_it_was(way, rule, x64):
    with jax.enable_x64(x64):
        state = make_state()
        sharding = replicated() if rule is replicated else rule
        restored = WAYS[way](state, sharding)
        assert_same_kinds(restored, state)
        for name, leaf in restored.items():
            if isinstance(leaf, jax.Array) and sharding is not None:
                shape = jax.random.key_data(leaf).shape if "key" in name else leaf.shape
                wanted = by_first_dim(name, jax.ShapeDtypeStruct(shape, "uint32"))
                assert leaf.sharding.is_equivalent_to(
                    wanted if rule is by_first_dim else sharding, leaf.ndim
                ), name


def test_it_comes_back_again_after_a_commit_of_what_came_back():
    state = make_state()
    for _ in range(2):
        restored = from_host_memory(state, None)
        assert_same_kinds(restored, state)
        state = restored


def is_narrowed(leaf):
    """Return whether a leaf in host memory would lose bits on devices without x64."""
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.name in (
        "int64", "uint64", "float64", "complex128",
    )  # fmt: skip


@WIDTHS
def test_with_a_sharding_what_init_makes_is_placed_as_device_put_does(x64):
    with jax.enable_x64(x64):
        names = ("string", "large int", "large float")
        state = {
            name: leaf for name, leaf in make_state().items() if name not in names and not is_narrowed(leaf)
        }
        placed = place_initial_state(state, replicated())
        assert_same_kinds(placed, jax.device_put(state, replicated()))
        assert all(leaf.sharding.is_equivalent_to(replicated(), leaf.ndim) for leaf in placed.values())
        # Once placed they are JAX arrays on all ways back.
        assert_same_kinds(restore(keep(placed), lambda: state, replicated()), placed)


@pytest.mark.parametrize("name", [name for name, leaf in make_state().items() if is_narrowed(leaf)])
def test_64_bits_that_a_sharding_would_halve_are_refused_before_step_0(name):
    leaf = make_state()[name]
    with pytest.raises(
        StateError,
        match=rf"leaf \['params'\]\['w'\] is a NumPy .* of {leaf.dtype}.* with a sharding, expected ",
    ) as refused:
        restore(CommittedState(), lambda: {"params": {"w": leaf}}, replicated())
    assert "Make it" in str(refused.value)
    assert "jax_enable_x64" in str(refused.value)


@pytest.mark.parametrize("number", [2**40, -(2**31) - 1, 1e300])
def test_a_python_number_that_a_sharding_would_change_is_refused(number):
    with pytest.raises(StateError, match=r"leaf \['n'\] is the Python number .*expected one that fits .*32"):
        place_initial_state({"n": number}, replicated())


class Phase(enum.IntEnum):
    WARMUP = 0


class Tensor:
    """Of another library, which NumPy can read."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros(2, np.float32)


class Subclass(np.ndarray):
    """Whose meaning would be lost."""


def make_wide():
    with jax.enable_x64(True):
        return jnp.zeros(2, jnp.float64)


REFUSED = {
    "object": (object, "a object, expected a JAX or NumPy array of numbers, a number or a string"),
    "enum": (lambda: Phase.WARMUP, "a Phase, expected"),
    "tensor": (Tensor, "a Tensor, expected"),
    "bytes": (lambda: b"abc", "a bytes, expected"),
    "masked": (lambda: np.ma.masked_array([1.0], [True]), "a MaskedArray, expected"),
    "subclass": (lambda: np.zeros(2).view(Subclass), "a Subclass, expected"),
    "int of more than 64 bits": (
        lambda: 2**64,
        "the Python int 18446744073709551616, expected one of 64 bits",
    ),
    "big-endian": (lambda: np.arange(5, dtype=">f4"), "a NumPy array of >f4, expected .*byte order"),
    "long double": (lambda: np.zeros(2, np.longdouble), "a NumPy array of float128, expected"),
    "dates": (lambda: np.zeros(2, "datetime64[s]"), "a NumPy array of datetime64"),
    "durations": (lambda: np.zeros(2, "timedelta64[s]"), "a NumPy array of timedelta64"),
    "records": (lambda: np.zeros(2, [("x", "f4")]), "a NumPy array of .*'x'"),
    "strings": (lambda: np.zeros(2, "S3"), "a NumPy array of .S3"),
    "objects": (lambda: np.array([object()]), "a NumPy array of object"),
    "JAX's 64 bits": (
        make_wide,
        r"a JAX array of float64\[2\], expected float32: JAX without jax_enable_x64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_back_is_refused_at_init_and_at_a_commit_by_its_path(name):
    make, said = REFUSED[name]
    leaf = make()
    with pytest.raises(StateError, match=rf"the state's leaf \['a'\]\[0\] is {said}"):
        restore(CommittedState(), lambda: {"a": [leaf]})
    with pytest.raises(StateError, match=rf"the state's leaf \['a'\]\[0\] is {said}"):
        flatten_state(1, {"a": [leaf]})


def test_a_memory_mapped_array_comes_back_as_an_array_in_memory(tmp_path):
    np.save(tmp_path / "w.npy", np.arange(4.0))
    state = {"w": np.load(tmp_path / "w.npy", mmap_mode="r")}
    for restored in (restore(CommittedState(), lambda: state), from_devices(state, None)):
        assert type(restored["w"]) is np.ndarray
        assert describe(restored["w"]) == describe(np.arange(4.0))


@pytest.mark.parametrize("sharding", [None, replicated], ids=["kept", "placed"])
def test_a_numpy_leaf_shares_no_memory_with_what_the_script_may_write_to(sharding):
    rule = sharding and sharding()
    made = np.zeros(1000, np.float32)
    state = restore(CommittedState(), lambda: {"w": made}, rule)
    made[:] = 7
    assert not np.asarray(state["w"]).any()
    committed = keep({"w": made})
    made[:] = 9
    for _ in range(2):
        restored = restore(committed, lambda: {"w": made})
        assert (restored["w"] == 7).all()
        restored["w"][:] = 8


def test_a_leaf_may_be_committed_as_another_kind_than_init_makes_and_comes_back_as_it_was_committed():
    """As `TrainState.step`: a number in init, an array after the first jitted step."""

    def init():
        return {"step": 0, "rate": 0.5, "scale": jnp.float32(1), "w": np.zeros(3)}

    def update(state):
        return {name: leaf + 1 for name, leaf in state.items()}

    committed = CommittedState()
    world = make_world(committed=committed)
    state = world.restore_or_init(init)
    for _ in world.steps(2):
        state = jax.jit(update)(state)
        world.commit(state)
    assert_same_kinds(restore(committed, init), state)
    assert state["step"].weak_type
    assert not state["scale"].weak_type
    state["scale"], state["rate"] = 2.5, np.float64(0.25)
    assert_same_kinds(restore(keep(state), init), state)


@pytest.mark.parametrize("through_host", [False, True])
def test_a_step_after_a_restore_is_traced_for_the_same_types(through_host):
    traced = []

    @jax.jit
    def step(state):
        traced.append(jax.tree.map(jax.typeof, state))
        return {"step": state["step"] + 1, "w": state["w"] * jnp.where(state["step"] > 3, 1.0, 0.5)}

    state = {"step": 0, "w": jnp.ones(3, jnp.bfloat16)}
    state = step(step(state))
    traced.clear()
    after = step(state)
    restored = (from_host_memory if through_host else from_devices)(state, None)
    assert_same_kinds(step(restored), after)
    assert traced == []


def test_a_rehearsed_state_has_the_kinds_of_the_initial_one():
    state = make_state()
    made = place_placeholder_state(make_abstract_state(lambda: state), None)
    assert {name: describe(leaf)[:-1] for name, leaf in made.items()} == {
        name: describe(leaf)[:-1] for name, leaf in state.items()
    }


@WIDTHS
def test_digests_see_every_bit_of_each_kind(x64):
    with jax.enable_x64(x64):
        state = {name: leaf for name, leaf in make_state().items() if np.size(leaf) and name != "string"}
        before = digest_state(flatten_state(1, state))
        assert (digest_state(copy_to_host(flatten_state(1, state))) == before).all()
        for name, leaf in state.items():
            if isinstance(leaf, jax.Array):
                continue
            other = np.array(leaf, order="C")
            other.reshape(-1)[-1:].view(np.uint8)[0] ^= 1  # the lowest bit, of no weight in 32
            changed = {**state, name: other if type(leaf) is np.ndarray else type(leaf)(other[()])}
            assert (digest_state(flatten_state(1, changed)) != before).any(), name


def test_programs_that_are_compiled_ahead_get_strongly_typed_arrays():
    state = {"weak": jnp.full((2,), 1.5), "n": 3, "x": 0.5, "name": "adam", "w": np.ones(2, np.float32)}
    found = make_strong(state)
    assert found.pop("name") == "adam"
    assert not any(leaf.weak_type for leaf in found.values())
    assert found["n"].dtype == jnp.int32
    assert {found[name].dtype for name in ("weak", "x", "w")} == {np.dtype("float32")}
    with pytest.raises(StateError, match=r"leaf \['w'\] is a NumPy array of float64"):
        make_strong({"w": np.ones(2)})
    inside = jax.jit(lambda: make_strong({"weak": jnp.where(jnp.arange(2) > 0, 1.0, 0.5)}))()
    assert not inside["weak"].weak_type


def test_a_weakly_typed_array_that_was_made_strong_would_change_the_next_step():
    """Why weak types matter: what this file is for."""
    half = jnp.ones(2, jnp.bfloat16)
    assert (half * jnp.asarray(0.1)).dtype == jnp.bfloat16
    assert (half * jnp.asarray(0.1, jnp.float32)).dtype == jnp.float32


@pytest.mark.parametrize(
    "committed", [jnp.zeros(2, jnp.float16), np.zeros(3), 1], ids=["dtype", "shape", "int"]
)
def test_a_commit_of_what_a_program_would_see_otherwise_is_still_refused(committed):
    world = make_world()
    world.restore_or_init(lambda: {"w": np.zeros(2)})
    for _ in world.steps(1):
        with pytest.raises(
            StateError, match=r"commit: found .* at \['w'\] instead of float64\[2\] \(a NumPy array\)"
        ):
            world.commit({"w": committed})
        world.commit({"w": jnp.zeros(2)})


def test_a_snapshot_names_the_kinds_of_its_own_state():
    hosts, host_of = hosts_of_eight(1)
    flat = flatten_state(1, {"n": 3})
    partition = partition_state(flat.leaves, host_of, hosts)
    check_same_structure(partition, flat.leaves)
    with pytest.raises(
        StateError,
        match=r"found \['n'\] of int64\[\] \(a NumPy scalar\), expected \['n'\] of int64\[\] \(a Python int\)",
    ):
        check_same_structure(partition, flatten_state(2, {"n": np.int64(3)}).leaves)
