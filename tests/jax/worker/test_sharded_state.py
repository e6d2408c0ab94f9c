"""A state in flat ranges: shares, the bits of complete arrays, and what is refused. On one host with eight devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from resilient_jax.errors import CallerError, StateError
from resilient_jax.sharding.raveled_array import is_raveled
from resilient_jax.worker.sharded_state import ShardedState
from resilient_jax.worker.world import World
from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.full_only import full_but
from tests.support.standalone_world import make_world

STEPS = 4
SHAPES = {"kernel": (37, 11), "bias": (67,), "scale": (5,)}
"""No dim is a multiple of the number of devices; the last has too few elements for ranges."""


class State(NamedTuple):
    params: Any
    opt_state: Any
    key: Any


def make_update(optimizer):
    def init():
        keys = jax.random.split(jax.random.key(1), len(SHAPES))
        params = {
            name: jax.random.normal(key, shape)
            for (name, shape), key in zip(SHAPES.items(), keys, strict=True)
        }
        return State(params, optimizer.init(params), jax.random.key(2))

    def update(state, gradients, rate):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        updates = jax.tree.map(lambda leaf: rate * leaf, updates)
        return State(optax.apply_updates(state.params, updates), opt_state, jax.random.fold_in(state.key, 1))

    return init, update


@jax.jit
def differentiate(params):
    return jax.tree.map(lambda leaf: jnp.sin(leaf) + leaf / 3, params)


def train_whole(init, update):
    state = jax.device_put(init(), jax.local_devices()[0])
    program = jax.jit(update)
    for _ in range(STEPS):
        state = program(state, differentiate(state.params), jnp.float32(0.5))
    return state


def train_sharded(init, update) -> tuple[World, Any, Any]:
    world = make_world()
    sharded = ShardedState(world, init)
    state = sharded.restore_or_init()
    for _ in world.steps(STEPS):
        gradients = differentiate(sharded.gather(state.params))
        state = sharded.update(update, state, gradients, jnp.float32(0.5))
        world.commit(state)
    return world, sharded, state


def to_numpy(tree):
    return jax.tree.map(
        lambda leaf: np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ),
        tree,
    )


ELEMENTWISE = {"adamw": optax.adamw(0.1), "rmsprop": optax.rmsprop(0.1, momentum=0.9)}
OTHERS = {"lamb": optax.lamb(0.1), "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))}


@pytest.mark.parametrize("name", full_but([*ELEMENTWISE, *OTHERS], {"adamw", "lamb"}.__contains__))
def test_the_state_is_that_of_complete_arrays_within_rounding(name, eight_devices):
    """Not its bits: what the compiler makes of the same update rounds at other places."""
    init, update = make_update((ELEMENTWISE | OTHERS)[name])
    _, sharded, state = train_sharded(init, update)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6),
        to_numpy(train_whole(init, update)),
        to_numpy(sharded.gather(state)),
    )


@pytest.mark.parametrize("name", full_but([*ELEMENTWISE, *OTHERS], {"adamw", "lamb"}.__contains__))
def test_the_bits_are_the_same_on_any_number_of_devices(name, eight_devices, monkeypatch):
    def train_on(count):
        with monkeypatch.context() as patch:
            for devices in (jax.devices, jax.local_devices):
                patch.setattr(jax, devices.__name__, lambda: eight_devices[:count])
            _, sharded, state = train_sharded(*make_update((ELEMENTWISE | OTHERS)[name]))
            return to_numpy(sharded.gather(state))

    for count in (1, 3):
        jax.tree.map(np.testing.assert_array_equal, train_on(8), train_on(count))


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OTHERS])
def test_every_device_has_its_share_whatever_the_update_does(name, eight_devices):
    _, _, state = train_sharded(*make_update((ELEMENTWISE | OTHERS)[name]))
    for leaf in jax.tree.leaves(state, is_leaf=is_raveled):
        assert is_raveled(leaf) == (leaf.size >= 64)
        if is_raveled(leaf):
            sizes = {shard.data.size for shard in leaf.vector.addressable_shards}
            assert sizes == {-(-leaf.size // len(eight_devices))}
            assert len({shard.index[0].start for shard in leaf.vector.addressable_shards}) == len(
                eight_devices
            )


def test_what_was_committed_is_restored_in_the_next_generation(eight_devices):
    init, update = make_update(ELEMENTWISE["adamw"])
    world, sharded, state = train_sharded(init, update)
    expected = to_numpy(sharded.gather(state))
    again = ShardedState(make_world(committed=world._session.committed), init)
    jax.tree.map(np.testing.assert_array_equal, expected, to_numpy(again.gather(again.restore_or_init())))


def test_an_update_is_traced_once_for_all_generations_of_a_mesh(eight_devices):
    init, update = make_update(ELEMENTWISE["adamw"])
    traced = []

    def count(*args):
        traced.append(len(args))
        return update(*args)

    train_sharded(init, count)
    first = len(traced)
    train_sharded(init, count)
    assert len(traced) == first


def test_what_cannot_be_sharded_is_refused_in_words(eight_devices):
    world = make_world()
    with pytest.raises(CallerError, match=r"found the string 'adam' at \['name'\], expected arrays alone"):
        ShardedState(world, lambda: {"name": "adam"}).restore_or_init()
    sharded = ShardedState(world, lambda: {"w": jnp.ones(100)})
    state = sharded.restore_or_init()
    with pytest.raises(
        CallerError, match=r"found float16\[100\] at \['w'\] of the result, expected float32\[100\]"
    ):
        sharded.update(lambda state: {"w": state["w"].astype(jnp.float16)}, state)
    with pytest.raises(CallerError, match="found a result of the structure"):
        sharded.update(lambda state: state["w"], state)
    with pytest.raises(
        CallerError, match=r"found .*ndarray.* at args\[0\], expected an array on this host's devices"
    ):
        sharded.update(lambda state, rate: state, state, np.ones(3))


def test_all_leaves_are_strongly_typed_before_and_after_each_step(eight_devices):
    """Programs for other hosts are compiled ahead by shapes and dtypes: weak types would make them useless."""

    def init():
        return {
            "wide": jnp.full((100,), 1.5),  # weakly typed
            "scale": jnp.asarray(2.0),
            "count": 0,
            "rate": 0.5,
            "given": np.ones((70,), np.float32),
        }

    def update(state):
        return {
            **state,
            "scale": jnp.where(state["count"] > 0, 1.0, 0.5),
            "count": state["count"] + 1,
            "wide": state["wide"] * state["scale"],
        }

    world = make_world()
    sharded = ShardedState(world, init)
    state = sharded.restore_or_init()
    for _ in world.steps(2):
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
        state = sharded.update(update, state)
        world.commit(state)
    again = ShardedState(make_world(committed=world._session.committed), init).restore_or_init()
    assert jax.tree.map(jax.typeof, again) == jax.tree.map(jax.typeof, state)
    with pytest.raises(StateError, match=r"leaf \['w'\] is a NumPy array of float64\[100\] with a sharding"):
        ShardedState(make_world(), lambda: {"w": np.ones(100)}).restore_or_init()
