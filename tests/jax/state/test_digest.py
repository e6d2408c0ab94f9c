"""The digest of a state depends on every bit of it, and on nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.state_digest import (
    STATE_DIGEST_WORDS,
    digest_state,
    find_differing,
    find_differing_copies,
    make_no_state_digest,
)
from tests.support.eight_devices import eight_devices as eight_devices

STATE = {
    "f32": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3),
    "bf16": jnp.linspace(-1, 1, 6).astype(jnp.bfloat16),
    "complex": np.array([1 + 2j, 3 - 1j], np.complex64),
    "bool": np.array([True, False, True]),
    "int8": np.array([-1, 5], np.int8),
    "step": np.int32(7),
    "empty": np.zeros((0, 3), np.float32),
}


def digest(tree):
    return digest_state(flatten_state(1, tree)).tolist()


def test_equal_states_have_equal_digests_on_any_devices(eight_devices):
    expected = digest(STATE)
    on_devices = jax.tree.map(jnp.asarray, STATE)
    assert digest(on_devices) == expected
    for count in (2, 8):
        mesh = Mesh(np.array(eight_devices[:count]), ("fsdp",))
        sharded = on_devices | {"f32": jax.device_put(STATE["f32"], NamedSharding(mesh, P("fsdp")))}
        assert digest(sharded) == expected
        replicated = on_devices | {"f32": jax.device_put(STATE["f32"], NamedSharding(mesh, P()))}
        assert digest(replicated) == expected


@pytest.mark.parametrize("name", [name for name, value in STATE.items() if np.size(value)])
def test_each_flipped_bit_changes_the_digest(name):
    value = np.asarray(STATE[name])
    seen = {tuple(digest(STATE))}
    bits = range(1) if value.dtype == np.bool_ else range(8 * value.dtype.itemsize)
    for element, bit in itertools.product(range(value.size), bits):
        changed = bytearray(value.tobytes())
        changed[element * value.dtype.itemsize + bit // 8] ^= 1 << bit % 8
        other = np.frombuffer(bytes(changed), value.dtype).reshape(value.shape)
        seen.add(tuple(digest(STATE | {name: other})))
    assert len(seen) == 1 + value.size * len(bits), "all differ, from each other, too"


def test_moved_elements_other_names_and_other_keys_change_the_digest():
    swapped = STATE | {"f32": STATE["f32"][::-1].copy()}
    renamed = {name if name != "f32" else "f33": value for name, value in STATE.items()}
    reshaped = STATE | {"f32": STATE["f32"].reshape(3, 8)}
    keys = [{"key": jax.random.key(seed)} for seed in (0, 1)]
    found = [tuple(digest(tree)) for tree in (STATE, swapped, renamed, reshaped, *keys)]
    assert len(set(found)) == len(found)


def test_a_donated_state_has_no_digest():
    state = {"w": jnp.ones(3)}
    flat = flatten_state(1, state)
    state["w"].delete()
    assert digest_state(flat).tolist() == make_no_state_digest().tolist()


@pytest.mark.parametrize(
    ("digests", "differing", "has_majority"),
    [
        ("aaa", [], True),
        ("a", [], True),
        ("aab", [2], True),
        ("baaca", [0, 3], True),
        ("ab", [0, 1], False),
        ("aabb", [0, 1, 2, 3], False),
        ("abc", [0, 1, 2], False),
        ("000", [], True),
        ("0a0", [], True),
        ("0aba", [2], True),
    ],
)
def test_the_state_of_most_hosts_counts(digests, differing, has_majority):
    words = {"0": (0, 0), "a": (0, 1), "b": (1, 0), "c": (5, 5)}
    assert find_differing([words[name] for name in digests]) == (differing, has_majority)


@pytest.mark.parametrize(
    ("keys", "digests", "differing", "has_majority"),
    [
        ("1122", "aabb", [], True),  # two copies of each of two shards
        ("1122", "aabc", [2, 3], False),
        ("111222", "aabccc", [2], True),
        ("111222", "aabcdc", [2, 4], True),
        ("1234", "abcd", [], True),  # no copies
    ],
)
def test_hosts_are_compared_with_those_that_have_the_same_shards(keys, digests, differing, has_majority):
    found = np.zeros((len(keys), STATE_DIGEST_WORDS), np.int32)
    found[:, :2] = 7
    found[:, 3] = [int(key) for key in keys]
    found[:, 4] = [ord(letter) for letter in digests]
    assert find_differing_copies(found) == (differing, has_majority)
    found[0, 1] = 5  # the complete leaves of one host
    others = len(keys) > 2
    assert find_differing_copies(found) == (sorted({0, *differing}), has_majority and others)
