"""The description of a state must fit into a message; a longer one is refused at once, with the reason."""

import jax.numpy as jnp
import pytest

from resilient_jax.errors import CallerError
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.snapshotter import MAX_DESCRIPTION_BYTES, check_description_size


def test_strings_that_exceed_a_message_are_refused_and_the_longest_is_named():
    state = {"tokenizer": "x" * MAX_DESCRIPTION_BYTES, "name": "llama", "weights": jnp.zeros(2)}
    with pytest.raises(
        CallerError, match=rf"1 arrays, the longest string \['tokenizer'\] {MAX_DESCRIPTION_BYTES + 13} "
    ):
        check_description_size(100, flatten_state(1, state))
    check_description_size(
        100, flatten_state(1, {**state, "tokenizer": "x" * (MAX_DESCRIPTION_BYTES - 1000)})
    )


def test_paths_and_slices_that_exceed_a_message_are_refused():
    with pytest.raises(
        CallerError, match=r"found 14680065 bytes of names, shapes, slices and strings \(1 arrays\)"
    ):
        check_description_size(MAX_DESCRIPTION_BYTES + 1, flatten_state(1, {"weights": jnp.zeros(2)}))
