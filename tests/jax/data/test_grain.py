"""A Grain dataset is read in Grain's own order, across epochs."""

import numpy as np
import pytest

from resilient_jax.data.grain_data import GrainData
from resilient_jax.data.microbatches import make_microbatch_data
from resilient_jax.errors import DataError

grain = pytest.importorskip("grain")


@pytest.fixture
def shuffled():
    return grain.MapDataset.source(np.arange(10, 15)).seed(1).shuffle()


def read(data, microbatches: int, steps: int) -> list[list[int]]:
    return [data.batch(step, index).tolist() for step in range(steps) for index in range(microbatches)]


def test_rows_are_the_elements_in_grains_order(shuffled) -> None:
    data = make_microbatch_data(shuffled, num_microbatches=2, microbatch_size=4)
    assert isinstance(data, GrainData)
    rows = [row for batch in read(data, 2, steps=3) for row in batch]
    assert rows == [int(shuffled[i]) for i in range(24)]
    assert data.batch(2, 1, (1, 2)).tolist() == rows[-2:]
    assert data.lengths(0, 0) is None


def test_every_epoch_has_every_element_once_in_its_own_order(shuffled) -> None:
    epochs = read(make_microbatch_data(shuffled, num_microbatches=1, microbatch_size=5), 1, steps=4)
    assert [sorted(epoch) for epoch in epochs] == [[10, 11, 12, 13, 14]] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_random_transformations_are_a_function_of_the_element_index(shuffled) -> None:
    def make():
        augmented = shuffled.random_map(lambda x, rng: {"x": x, "noise": rng.integers(1 << 30)})
        return make_microbatch_data(augmented, num_microbatches=2, microbatch_size=5)

    in_order = make()
    expected = [in_order.batch(step, index) for step in range(2) for index in range(2)]
    assert np.array_equal(make().batch(1, 1)["noise"], expected[3]["noise"])
    assert len({tuple(batch["noise"].tolist()) for batch in expected}) == 4


def test_elements_may_be_microbatches(shuffled) -> None:
    dataset = shuffled.repeat().batch(4)
    data = make_microbatch_data(dataset, num_microbatches=2, microbatch_size=None)
    assert read(data, 2, steps=2) == [dataset[i].tolist() for i in range(4)]
    assert data.batch(1, 1, (1, 2)).tolist() == dataset[3].tolist()[2:]


def test_a_short_last_batch_is_refused(shuffled) -> None:
    data = make_microbatch_data(shuffled.batch(2), num_microbatches=3, microbatch_size=None)
    with pytest.raises(DataError, match=r"microbatch 2: found int64\[1\], expected int64\[2\]"):
        read(data, 3, steps=1)


@pytest.mark.parametrize("size", [1, None])
def test_a_filtered_out_element_is_refused(size: int | None) -> None:
    dataset = grain.MapDataset.range(5).filter(lambda x: x != 3).map(lambda x: x if size else np.array([x]))
    data = make_microbatch_data(dataset, num_microbatches=5, microbatch_size=size)
    assert data.batch(0, 2).tolist() == [2]
    with pytest.raises(
        DataError, match=r"item 3 of .*: found None, expected an example\. If a filter took it out"
    ):
        data.batch(0, 3)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="found no items"):
        make_microbatch_data(grain.MapDataset.range(0), num_microbatches=1, microbatch_size=1)


def test_an_iter_dataset_is_refused_because_it_has_no_random_access(shuffled) -> None:
    with pytest.raises(DataError, match="give the MapDataset that the IterDataset was made from"):
        make_microbatch_data(shuffled.to_iter_dataset(), num_microbatches=1, microbatch_size=1)


def test_shuffling_by_us_is_refused_with_a_hint_to_shuffle_in_grain(shuffled) -> None:
    with pytest.raises(DataError, match=r"shuffle: found True .* Call shuffle on the dataset"):
        make_microbatch_data(shuffled, num_microbatches=1, microbatch_size=1, shuffle=True)
