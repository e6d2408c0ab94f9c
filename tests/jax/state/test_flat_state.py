"""The state between generations: restored exactly, with the requested sharding, or refused with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import StateError
from resilient_jax.state.flat_state import copy_to_host, flatten_state, make_abstract_state
from resilient_jax.state.state_placement import place_initial_state, restore_state


def make_state() -> dict:
    return {
        "weights": jnp.arange(12.0).reshape(3, 4),
        "half": jnp.ones((2,), jnp.bfloat16) * 1.5,
        "count": jnp.zeros((), jnp.int32),
        "flag": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(7),
        "nested": ({"a": jnp.float32(2.5)}, [jnp.uint8(3)]),
    }


def assert_same(one: object, other: object) -> None:
    def plain(leaf: jax.Array) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(leaf))
        return np.asarray(leaf)

    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(plain(a), plain(b))


@pytest.mark.parametrize("through_host", [False, True])
def test_a_state_round_trips_bit_for_bit(through_host: bool) -> None:
    state = make_state()
    held = flatten_state(5, state)
    if through_host:
        held = copy_to_host(held)
    assert held.step == 5
    assert_same(restore_state(jax.eval_shape(make_state), held, None), state)


def test_a_host_copy_does_not_alias_the_devices_memory() -> None:
    array = jnp.ones((4,))
    copy = copy_to_host(flatten_state(0, {"x": array})).leaves[0].value
    assert not np.shares_memory(copy, np.asarray(array))


def test_leaves_get_the_requested_sharding() -> None:
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("data",))
    sharding = NamedSharding(mesh, P())
    placed = place_initial_state({"x": jnp.ones((2, 2))}, sharding)
    again = restore_state(jax.eval_shape(lambda: {"x": jnp.ones((2, 2))}), flatten_state(0, placed), sharding)
    assert placed["x"].sharding == sharding
    assert again["x"] is placed["x"], "what lies right is not copied"


def test_a_sharding_may_depend_on_the_leaf() -> None:
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("data",))
    seen = []

    def choose(path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        seen.append((path, leaf.shape))
        return NamedSharding(mesh, P())

    restore_state(
        jax.eval_shape(lambda: {"x": jnp.ones((2,))}),
        copy_to_host(flatten_state(0, {"x": jnp.ones((2,))})),
        choose,
    )
    assert seen == [("['x']", (2,))]


def test_a_donated_leaf_is_refused_with_its_path() -> None:
    array = jnp.ones((2,))
    array.delete()
    with pytest.raises(StateError, match=r"leaf \['x'\] was deleted.*donated"):
        flatten_state(1, {"x": array})


def test_strings_are_restored_and_must_be_at_the_expected_paths() -> None:
    def init() -> dict[str, object]:
        return {"name": "nobody", "x": jnp.zeros(2)}

    assert make_abstract_state(init) == {"name": "nobody", "x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    held = copy_to_host(flatten_state(1, {"name": "llama", "x": jnp.ones(2)}))
    restored = restore_state(make_abstract_state(init), held, None)
    assert restored["name"] == "llama"
    (text,) = flatten_state(1, {"name": np.str_("llama")}).strings.values()
    assert type(text) is str
    np.testing.assert_array_equal(restored["x"], np.ones(2))
    with pytest.raises(StateError, match=r"no \['name'\]"):
        restore_state(make_abstract_state(init), flatten_state(1, {"x": jnp.ones(2)}), None)
    with pytest.raises(StateError, match=r"no \['x'\]"):  # a string in place of an array
        restore_state(make_abstract_state(init), flatten_state(1, {"name": "llama", "x": "two"}), None)


def test_another_structure_is_refused_with_the_first_paths_that_differ() -> None:
    held = flatten_state(1, {"x": jnp.ones(2), "old": jnp.ones(2)})
    with pytest.raises(
        StateError,
        match=r"found no \['new'\]; \['old'\], which is not in it, expected the state that the init",
    ):
        restore_state(jax.eval_shape(lambda: {"x": jnp.ones(2), "new": jnp.ones(2)}), held, None)


def test_another_shape_is_refused_with_both_shapes() -> None:
    held = flatten_state(1, {"x": jnp.ones(2)})
    with pytest.raises(StateError, match=r"float32\[2\] at \['x'\] instead of float32\[3\], expected"):
        restore_state(jax.eval_shape(lambda: {"x": jnp.ones(3)}), held, None)


def test_an_init_that_cannot_be_traced_is_refused_when_it_is_first_used() -> None:
    def init() -> dict[str, np.ndarray]:
        return {"w": np.asarray(jax.random.normal(jax.random.key(0), (3,)))}

    with pytest.raises(
        StateError, match=r"cannot be traced .*expected jax\.numpy .*before rj\.run with numpy"
    ):
        make_abstract_state(init)
