"""A microbatch is a pure function of seed, step and index; the error names a source that breaks this contract."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.data.function_data import FunctionData
from resilient_jax.data.microbatches import make_microbatch_data
from resilient_jax.data.random_access import RandomAccessData
from resilient_jax.errors import DataError

sizes = st.integers(1, 6)


def read(data, microbatches: int, steps: int) -> list[int]:
    """Return all rows of a source of numbers, in order."""
    return [
        row
        for step in range(steps)
        for index in range(microbatches)
        for row in data.batch(step, index).tolist()
    ]


@given(st.integers(1, 40), sizes, sizes, st.booleans(), st.integers(0, 2**64 - 1))
def test_every_epoch_has_every_example_once(
    n: int, microbatches: int, size: int, shuffle: bool, seed: int
) -> None:
    data = make_microbatch_data(
        range(n), num_microbatches=microbatches, microbatch_size=size, seed=seed, shuffle=shuffle
    )
    rows = read(data, microbatches, steps=3)
    epochs = [rows[first : first + n] for first in range(0, len(rows), n)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch), "none twice, not even in the last one, which is cut off"
        assert len(epoch) == n or epoch is epochs[-1]
        assert shuffle or epoch == list(range(len(epoch)))


def test_a_microbatch_does_not_depend_on_what_was_read_before() -> None:
    def make():
        return make_microbatch_data(np.arange(1000), num_microbatches=4, microbatch_size=8, seed=7)

    in_order = make()
    expected = {(s, i): in_order.batch(s, i).tolist() for s in range(50) for i in range(4)}
    for step, index in [(49, 3), (0, 0), (31, 2), (31, 2)]:
        assert make().batch(step, index).tolist() == expected[step, index]


def test_the_order_is_pinned() -> None:
    data = make_microbatch_data(range(5), num_microbatches=2, microbatch_size=3, seed=0)
    assert read(data, 2, steps=2) == [3, 2, 4, 1, 0, 2, 3, 1, 0, 4, 1, 4]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    rows = read(make_microbatch_data(range(30), num_microbatches=1, microbatch_size=30), 1, steps=2)
    assert rows[:30] != rows[30:] != list(range(30))
    assert (
        read(make_microbatch_data(range(30), num_microbatches=1, microbatch_size=30, seed=1), 1, steps=1)
        != rows[:30]
    )


SOURCES: dict[str, Any] = {
    "a random-access source": list(range(50)),
    "a function": lambda step, index: np.arange(12) + 100 * step + 1000 * index,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_parts_of_a_microbatch_are_its_rows_in_order(kind: str) -> None:
    data = make_microbatch_data(SOURCES[kind], num_microbatches=2, microbatch_size=12)
    for n in (1, 2, 3, 4, 6, 12):
        parts = [data.batch(5, 1, (k, n)) for k in range(n)]
        assert {len(part) for part in parts} == {12 // n}
        assert np.concatenate(parts).tolist() == data.batch(5, 1).tolist()


def test_a_part_reads_its_own_rows_only() -> None:
    numbers = []

    class Logged(list[int]):
        def __getitem__(self, number):
            numbers.append(number)
            return super().__getitem__(number)

    data = make_microbatch_data(Logged(range(100)), num_microbatches=2, microbatch_size=10, shuffle=False)
    assert data.batch(1, 1, (1, 2)).tolist() == numbers == [35, 36, 37, 38, 39]


def test_examples_are_stacked_leaf_by_leaf() -> None:
    source = [
        {"x": np.full((2, 3), i, np.float32), "y": (i, float(i)), "flag": i % 2 == 0, "b": jnp.bfloat16(i)}
        for i in range(4)
    ]
    batch = make_microbatch_data(source, num_microbatches=1, microbatch_size=4, shuffle=False).batch(0, 0)
    assert batch["x"].shape == (4, 2, 3)
    assert batch["x"].dtype == np.float32
    assert batch["y"][0].tolist() == [0, 1, 2, 3]
    assert batch["y"][1].dtype == np.float64
    assert batch["flag"].tolist() == [True, False, True, False]
    assert batch["b"].dtype == jnp.bfloat16


def test_a_functions_result_is_returned() -> None:
    data = make_microbatch_data(
        lambda step, index: {"a": np.full((4, 2), step), "b": np.full(4, index)},
        num_microbatches=3,
        microbatch_size=None,
    )
    assert isinstance(data, FunctionData)
    batch = data.batch(7, 2, (1, 2))
    assert batch["a"].tolist() == [[7, 7], [7, 7]]
    assert batch["b"].tolist() == [2, 2]
    assert data.lengths(7, 2) is None


class ReadyMade:
    """An implementation of `MicrobatchData`."""

    def batch(self, step: int, index: int, part: tuple[int, int] = (0, 1)) -> np.ndarray:
        return np.zeros(1)

    def lengths(self, step: int, index: int) -> None:
        return None


def test_microbatch_data_is_returned_as_it_is() -> None:
    ready = ReadyMade()
    assert make_microbatch_data(ready, num_microbatches=3, microbatch_size=None) is ready


def test_a_callable_source_is_no_function() -> None:
    class Callable(list[int]):
        def __call__(self) -> None: ...

    assert isinstance(
        make_microbatch_data(Callable([1]), num_microbatches=1, microbatch_size=1), RandomAccessData
    )


def test_a_source_without_lengths_has_none() -> None:
    assert make_microbatch_data([1, 2], num_microbatches=1, microbatch_size=1).lengths(0, 0) is None


# Errors.


class NegativeLength(list[int]):
    def __len__(self):
        return -1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            iter([1, 2]),
            r"data: found a list_iterator, expected \(1\) arrays .* \(5\) .*An iterator cannot",
        ),
        (3, "data: found a int, expected"),
        (list, r"found the class list itself, .* Give an object"),
        ("mnist.npz", r"found 'mnist\.npz', expected the data\. Load what is there"),
        (lambda step: np.zeros(1), r"found a function of \(step\), expected batch\(step, index\)"),
        ([], r"the source \(list\): found no items"),
        (np.array(3), r"data: found int64\[\], expected an array of numbers whose first dimension"),
        (
            NegativeLength(),
            r"the source \(NegativeLength\): found no length \(__len__\(\) should return >= 0\)",
        ),
    ],
)
def test_an_object_that_is_no_source_is_refused(source: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_microbatch_data(source, num_microbatches=1, microbatch_size=1)


class Short:
    """A source whose length exceeds its items."""

    def __init__(self, items: dict | list) -> None:
        self.items = items

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> object:
        return self.items[number]


@pytest.mark.parametrize("items", [[1, 2], {0: 1, 1: 2}])
def test_the_error_names_a_source_that_is_shorter_than_its_length(items: dict | list) -> None:
    data = make_microbatch_data(Short(items), num_microbatches=1, microbatch_size=3, shuffle=False)
    with pytest.raises(
        DataError, match=r"item 2 of Short: .* shorter than promised \(its length was 10\)"
    ) as caught:
        data.batch(0, 0)
    assert isinstance(caught.value.__cause__, IndexError | KeyError)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": np.zeros(3)}, "item 1 of list: found the tree .* expected .* as in item 0 of list"),
        (
            {"x": np.zeros(4), "y": 0},
            r"leaf \['x'\]: found float64\[4\], expected float64\[3\] as in item 0 of list",
        ),
        ({"x": np.zeros(3), "y": 0.0}, r"leaf \['y'\]: found float64\[\], expected int64\[\]"),
        ({"x": np.zeros(3), "y": "zero"}, r"item 1 of list\['y'\]: found str, expected an array of numbers"),
        (
            {"x": np.array(["a"]), "y": 0},
            r"\['x'\]: found an array of dtype <U1, expected an array of numbers",
        ),
        ({"x": np.zeros(3, "i4,f4"), "y": 0}, r"\['x'\]: found an array of dtype \[.*expected an array"),
        ({"x": np.zeros(3), "y": 2**70}, r"\['y'\]: found an array of dtype object"),
        (
            {"x": np.zeros(3), "y": [0, 1]},
            r"item 1 of list\['y'\]: found a list of 2 numbers, expected an array",
        ),
        ([1.5, 2], r"item 1 of list: found a list of 2 numbers, .* np\.asarray"),
        (None, r"item 1 of list: found None, expected an example\. If a filter"),
        ((), r"item 1 of list: found \(\), which holds no arrays"),
    ],
)
def test_the_error_names_an_item_with_another_layout_than_the_first(other: object, message: str) -> None:
    source = [{"x": np.zeros(3), "y": 0}, other]
    data = make_microbatch_data(source, num_microbatches=2, microbatch_size=1, shuffle=False)
    data.batch(0, 0)
    with pytest.raises(DataError, match=message):
        data.batch(0, 1)


@pytest.mark.parametrize("error", [ValueError("mine"), OSError(5, "disk"), StopIteration("odd")])
def test_any_other_error_of_the_source_passes_unchanged(error: Exception) -> None:
    class Failing(list[int]):
        def __getitem__(self, number):
            raise error

    def fail(step: int, index: int) -> None:
        raise error

    for source in (Failing([1]), fail):
        with pytest.raises(type(error)) as caught:
            make_microbatch_data(source, num_microbatches=1, microbatch_size=1).batch(0, 0)
        assert caught.value is error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda s, i: np.zeros((4 + s, 2)),
            r"step 1, microbatch 0: found float64\[5,2\], expected float64\[4,2\] as in",
        ),
        (
            lambda s, i: (np.zeros(4), np.zeros(3)),
            r"shapes \[\(4,\), \(3,\)\], expected as the first dimension",
        ),
        (lambda s, i: 7, r"shapes \[\(\)\], expected as the first dimension"),
        (lambda s, i: np.zeros((0, 2)), r"the number of examples, at least 1"),
        (lambda s, i: None, r"step 0, microbatch 0: found None, which holds no arrays"),
    ],
)
def test_the_error_names_an_invalid_result_of_a_function(
    function: Callable[[int, int], object], message: str
) -> None:
    data = make_microbatch_data(function, num_microbatches=1, microbatch_size=None)
    with pytest.raises(DataError, match=message):
        [data.batch(step, 0) for step in range(2)]


def test_a_function_that_returns_another_size_than_configured_is_refused() -> None:
    data = make_microbatch_data(lambda step, index: np.zeros((4, 2)), num_microbatches=1, microbatch_size=8)
    with pytest.raises(DataError, match=r"shapes \[\(4, 2\)\], expected .* the number of examples, 8"):
        data.batch(0, 0)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((0, 5), r"part \(0, 5\): found a microbatch of 12 rows, expected a multiple of 5"),
        ((2, 2), r"part: found \(2, 2\), expected \(k, n\)"),
        ((0, 0), r"part: found \(0, 0\), expected \(k, n\)"),
    ],
)
def test_an_invalid_part_is_refused(source: object, part: tuple[int, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_microbatch_data(source, num_microbatches=1, microbatch_size=12).batch(0, 0, part)


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (0, 2), (0, -1)])
def test_a_microbatch_out_of_range_is_refused(step: int, index: int) -> None:
    with pytest.raises(DataError, match=rf"step {step}, microbatch {index}: expected .* from 0 to 1"):
        make_microbatch_data([1, 2, 3], num_microbatches=2, microbatch_size=1).batch(step, index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 1, "microbatch_size": 0}, "microbatch_size: found 0, expected at least 1"),
        ({"num_microbatches": 0, "microbatch_size": 1}, "num_microbatches: found 0, expected at least 1"),
        (
            {"num_microbatches": 1, "microbatch_size": None},
            r"microbatch_size: found None for a source of examples \(list\)",
        ),
        (
            {"num_microbatches": 1, "microbatch_size": 2.0},
            r"microbatch_size: found 2\.0 \(float\), expected an integer",
        ),
        (
            {"num_microbatches": "2", "microbatch_size": 2},
            r"num_microbatches: found '2' \(str\), expected an integer",
        ),
        (
            {"num_microbatches": 1, "microbatch_size": 2, "seed": 1.5},
            r"seed: found 1\.5 \(float\), expected an integer",
        ),
    ],
)
def test_invalid_sizes_and_seeds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_microbatch_data([1, 2], **options)


def test_numpy_integers_are_accepted() -> None:
    numbers: dict[str, Any] = {
        "num_microbatches": np.int64(1),
        "microbatch_size": np.int32(2),
        "seed": np.uint8(3),
    }
    data = make_microbatch_data([1, 2], **numbers)
    assert sorted(data.batch(0, 0).tolist()) == [1, 2]


@pytest.mark.parametrize("source", [ReadyMade(), lambda step, index: np.zeros(1)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffling_a_source_with_its_own_order_is_refused(source: object, shuffle: bool) -> None:
    with pytest.raises(DataError, match=f"shuffle: found {shuffle} for a source that has its own order"):
        make_microbatch_data(source, num_microbatches=1, microbatch_size=1, shuffle=shuffle)
