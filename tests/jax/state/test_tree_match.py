"""Matching of trees: arrays are matched by path, and all differences are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.checkpoint.stored_tree import format_orbax_path
from resilient_jax.errors import StateError
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.tree_match import list_leaf_specs, match_tree

WANTED = {
    "w": jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "key": jax.eval_shape(lambda: jax.random.key(0)),
    "name": "a",
}


def match(found, strings=None, **options):
    names = {"['name']": "b"} if strings is None else strings
    return match_tree(WANTED, found, names, None, source="here", expected="that", **options)


def test_a_flat_state_and_an_abstract_tree_have_the_same_specs():
    state = flatten_state(1, {"w": jnp.zeros((2, 3)), "key": jax.random.key(1), "name": "a"})
    assert [leaf.spec for leaf in state.leaves] == list_leaf_specs(WANTED)


def test_arrays_in_any_order_are_built_into_the_wanted_tree():
    matched = match(list_leaf_specs(WANTED)[::-1])
    data = {"['w']": np.ones((2, 3), np.float32), "['key']": np.array([1, 2], np.uint32)}
    tree = matched.build([data[leaf.spec.path] for leaf in matched.leaves])
    assert tree["name"] == "b"
    assert (tree["w"] == 1).all()
    np.testing.assert_array_equal(jax.random.key_data(tree["key"]), [1, 2])


def test_the_first_differences_are_named_and_all_are_counted():
    found = [LeafSpec("['w']", "float32", (3, 2)), LeafSpec("['x']", "float32", ())]
    with pytest.raises(
        StateError,
        match=r"here: found no \['key'\]; \['x'\], which is not in it; float32\[3, 2\] at \['w'\] instead of "
        r"float32\[2, 3\] \(4 differences\), expected that",
    ):
        match(found, strings={})


def test_the_data_of_a_key_is_not_an_array_of_integers():
    found = [LeafSpec("['w']", "float32", (2, 3)), LeafSpec("['key']", "uint32", (2,))]
    with pytest.raises(
        StateError, match=r"uint32\[2\] at \['key'\] instead of uint32\[2\] \(data of a .* key\)"
    ):
        match(found)


def test_names_with_a_slash_give_distinct_paths():
    one, other = {"a/b": {"c": 0}}, {"a": {"b/c": 0}}
    paths = [format_orbax_path(jax.tree_util.tree_leaves_with_path(tree)[0][0]) for tree in (one, other)]
    assert paths[0] != paths[1]
