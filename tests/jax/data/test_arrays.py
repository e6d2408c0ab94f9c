"""Arrays of equal first dimensions are a data set of rows; what could be something else is refused."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

from resilient_jax.data.array_rows import MAX_UNNAMED_COLUMNS
from resilient_jax.data.microbatches import make_microbatch_data
from resilient_jax.errors import DataError
from resilient_jax.trainer.evaluation import Evaluation

N = 6
X = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
Y = np.arange(N, dtype=np.int32)


class Columns(NamedTuple):
    """Named columns."""

    x: Any
    y: Any


def read(source: object, **options: Any) -> Any:
    return make_microbatch_data(source, num_microbatches=2, microbatch_size=3, **options).batch(0, 1)


@pytest.mark.parametrize(
    "source",
    [
        X,
        (X, Y),
        {"x": X, "y": Y},
        {"inputs": (X, {"mask": Y}), "targets": Y},
        (jnp.asarray(X), Y),
        Columns(X, Y),
        {"x": X.astype(jnp.bfloat16)},
    ],
    ids=["an array", "a tuple", "a dict", "nested", "of JAX", "a named tuple", "bfloat16"],
)
def test_example_i_is_row_i_of_every_array(source: Any) -> None:
    batch = read(source, shuffle=False)
    assert jax.tree.structure(batch) == jax.tree.structure(source)
    for found, leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(source), strict=True):
        assert isinstance(found, np.ndarray)
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(found, np.asarray(leaf)[3:6])


def test_columns_are_read_in_the_order_of_a_list_of_their_rows() -> None:
    columns, rows = read((X, Y), seed=5), read([(x, y) for x, y in zip(X, Y, strict=True)], seed=5)
    jax.tree.map(np.testing.assert_array_equal, columns, rows)


def test_a_batch_is_a_copy() -> None:
    source = {"x": X.copy()}
    read(source)["x"][:] = -1
    np.testing.assert_array_equal(source["x"], X)


def test_other_mappings_are_read_as_dicts(tmp_path: Any) -> None:
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    expected = read({"x": X, "y": Y})
    with np.load(tmp_path / "data.npz") as file:
        jax.tree.map(np.testing.assert_array_equal, read(file), expected)
    jax.tree.map(np.testing.assert_array_equal, read(freeze({"x": X, "y": Y})), expected)


def test_an_array_of_objects_and_a_list_are_examples() -> None:
    examples = [{"x": x} for x in X]
    objects = np.array(examples, dtype=object)
    assert (
        read(objects, shuffle=False)["x"].tolist()
        == read(examples, shuffle=False)["x"].tolist()
        == X[3:].tolist()
    )
    many = [np.full(40, i) for i in range(MAX_UNNAMED_COLUMNS + 1)]
    assert read(many, shuffle=False)[:, 0].tolist() == [3, 4, 5]


def test_an_evaluation_counts_the_rows() -> None:
    evaluation = Evaluation(data=(X, Y), interval_steps=1)
    assert evaluation.count_microbatches(2) == 3
    assert evaluation.make_data(2, seed=0).batch(7, 1)[1].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X, Y[:4]), "columns of different lengths, data[0] float32[6,2], data[1] int32[4]; expected"),
        ({"x": X, "scale": np.float32(2)}, "data['scale']: found a float32, expected an array"),
        (
            {"x": X, "n": np.array(2)},
            "data['n']: found int64[], expected an array of numbers whose first dimension",
        ),
        ({"x": X, "y": [1, 2, 3, 4, 5, 6]}, "data['y']: found a list, expected an array"),
        (
            {"x": X, "name": np.array(list("abcdef"))},
            "data['name']: found <U1[6], expected an array of numbers",
        ),
        ({0: X, 1: X}, "data: found a dict with the key 0, expected names of columns"),
        (
            {"train": {"x": X}, "keys": jax.random.split(jax.random.key(0), 6)},
            "data['keys']: found random keys",
        ),
        ((1, 2, 3), "data[0]: found a int, expected an array"),
        (((X[0], 1), (X[1], 2)), "data[0][1]: found a int, expected an array"),
        (("train", "test"), "data[0]: found a str"),
        ((), "data: found (), which holds no arrays"),
        ({}, "data: found {}, which holds no arrays"),
        (
            tuple(np.zeros((20, 8))),
            "data: found a tuple of 20 items, expected the columns of a data set, at most 16",
        ),
        (
            [X, Y],
            "found a list of 2 arrays, float32[6,2], int32[6]: they could be 2 examples, or the columns of 6",
        ),
        ([X, X], "they could be 2 examples, or the columns of 6"),
        ((X[:0], Y[:0]), "found no items, expected at least one"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_could_be_something_else_is_refused(source: object, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as found:
        read(source)
    assert "no items" in message or "give a tuple or a dict of arrays" in str(found.value), "the remedy"
