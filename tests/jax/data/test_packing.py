"""Packed rows contain every token once, in order, and mark each document."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.data.microbatches import make_microbatch_data
from resilient_jax.data.packing import PackedDocuments, pack_documents
from resilient_jax.errors import DataError

all_lengths = st.lists(st.integers(0, 40), max_size=40)
contexts = st.integers(1, 16)


def make_documents(lengths: list[int]) -> list[np.ndarray]:
    """Return documents whose tokens are all different, and none 0."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(a + 1, b + 1, dtype=np.int64) for a, b in itertools.pairwise(ends)]


@given(all_lengths, contexts)
def test_rows_are_filled_in_order_and_closed_only_if_the_next_piece_does_not_fit(lengths, context) -> None:
    packing = pack_documents(lengths, context)
    rows = [packing.list_pieces(row) for row in range(len(packing))]
    assert [piece for row in rows for piece in row] == list(range(len(packing.documents)))
    used = [int(packing.lengths[row.start : row.stop].sum()) for row in rows]
    assert all(0 < n <= context for n in used)
    for n, following in zip(used, rows[1:], strict=False):
        assert n + packing.lengths[following.start] > context


@given(all_lengths, contexts)
def test_every_token_is_in_exactly_one_piece(lengths, context) -> None:
    packing = pack_documents(lengths, context)
    covered: list[list[int]] = [[] for _ in lengths]
    for document, start, length in zip(packing.documents, packing.starts, packing.lengths, strict=True):
        covered[document].extend(range(start, start + length))
    assert covered == [list(range(length)) for length in lengths]


@given(all_lengths, contexts)
def test_the_rows_contain_all_tokens_in_order(lengths, context) -> None:
    packed = PackedDocuments(make_documents(lengths), context)
    rows = [packed[row] for row in range(len(packed))]
    tokens = [int(t) for row in rows for t in row["tokens"][row["segments"] > 0]]
    assert tokens == list(range(1, sum(lengths) + 1))


@given(all_lengths, contexts, st.data())
def test_documents_appended_later_change_no_finished_row(lengths, context, data) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    whole, shorter = pack_documents(lengths, context), pack_documents(lengths[:cut], context)
    finished = max(len(shorter) - 1, 0)
    assert whole.row_bounds[: finished + 1].tolist() == shorter.row_bounds[: finished + 1].tolist()


def test_a_row_marks_the_document_of_each_token() -> None:
    packed = PackedDocuments([[11, 12], [21, 22, 23], [], [31, 32, 33, 34, 35, 36, 37, 38]], 6, pad_token=-1)
    assert len(packed) == 3
    rows = [{name: leaf.tolist() for name, leaf in packed[row].items()} for row in range(3)]
    assert rows[0] == {
        "tokens": [11, 12, 21, 22, 23, -1],
        "segments": [1, 1, 2, 2, 2, 0],
        "positions": [0, 1, 0, 1, 2, 0],
    }
    assert rows[1] == {
        "tokens": [31, 32, 33, 34, 35, 36],
        "segments": [1] * 6,
        "positions": [0, 1, 2, 3, 4, 5],
    }
    assert rows[2] == {
        "tokens": [37, 38, -1, -1, -1, -1],
        "segments": [1, 1, 0, 0, 0, 0],
        "positions": [0, 1, 0, 0, 0, 0],
    }
    assert {leaf.dtype for leaf in packed[0].values()} == {np.dtype(np.int32)}
    assert [packed.lengths(row).tolist() for row in range(3)] == [[2, 3, 1], [6], [2, 1, 1, 1, 1]]
    assert packed.lengths(0).dtype == np.int32


def test_packed_documents_are_a_source_with_the_lengths_of_its_microbatches() -> None:
    packed = PackedDocuments(make_documents([3, 4, 5, 9, 1, 1, 1]), 8)
    data = make_microbatch_data(packed, num_microbatches=2, microbatch_size=2, seed=3)
    for step in range(3):
        for index in range(2):
            segments = data.batch(step, index)["segments"]
            found: list[int] = []
            for row in segments:
                found += [int((row == n).sum()) for n in range(1, row.max() + 1)]
                found += [1] * int((row == 0).sum())  # padding is computed, too
            lengths = data.lengths(step, index)
            assert lengths is not None
            assert lengths.dtype == np.int32
            assert lengths.tolist() == found


class CountedReads(list[list[int]]):
    """Documents that count their reads."""

    reads = 0

    def __getitem__(self, number):
        self.reads += 1
        return super().__getitem__(number)


def test_with_known_lengths_no_document_is_read_before_it_is_needed() -> None:
    documents = CountedReads([[1, 2], [3], [4, 5, 6]])
    packed = PackedDocuments(documents, 3, document_lengths=[2, 1, 3])
    assert documents.reads == 0
    assert packed[1]["tokens"].tolist() == [4, 5, 6]
    assert documents.reads == 1


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1], [1.5]], r"item 1 of list: found float64\[1\], expected tokens"),
        ([[[1, 2]]], r"item 0 of list: found int64\[1, 2\], expected tokens"),
        ([[1], [[1, 2], [3]]], r"item 1 of list: found no array \(.*inhomogeneous.*\), expected tokens"),
        ([[1, 2**31]], r"item 0 of list: found tokens from 1 to 2147483648, expected 32-bit ones"),
    ],
)
def test_a_document_that_is_no_row_of_tokens_is_refused(documents: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedDocuments(documents, 4)


def test_a_document_of_another_length_than_given_is_refused() -> None:
    packed = PackedDocuments([[1, 2], [3]], 4, document_lengths=[2, 2])
    with pytest.raises(DataError, match="item 1 of list: found 1 tokens, expected 2"):
        packed[0]


def test_invalid_lengths_and_context_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="document_lengths: found 1, expected 2"):
        PackedDocuments([[1], [2]], 4, document_lengths=[1])
    with pytest.raises(DataError, match="context_length: found 0"):
        pack_documents([1], 0)
    with pytest.raises(DataError, match=r"context_length: found 4\.0 \(float\), expected an integer"):
        pack_documents([1], 4.0)  # pyright: ignore[reportArgumentType]
    bad_lengths: list[Any] = [[2.9], ["x"], [[1], [2, 3]], [[1, 2]]]
    for lengths in bad_lengths:
        with pytest.raises(DataError, match=r"document lengths: found .*, expected integers, one for each"):
            PackedDocuments([[1, 2]], 4, document_lengths=lengths)
    with pytest.raises(DataError, match=r"the source \(ndarray\): found no length"):
        PackedDocuments(np.array(3), 4)
    with pytest.raises(DataError, match="document 1: found length -2"):
        pack_documents([1, -2], 4)


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        (2**40, f"pad: found {2**40}, expected a 32-bit token"),
        (1.7, r"pad: found 1\.7 \(float\), expected an integer"),
    ],
)
def test_a_pad_token_that_is_no_token_is_refused(pad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedDocuments([[1]], 2, pad)


def test_a_packed_source_ends_where_its_rows_end() -> None:
    packed = PackedDocuments([[1, 2], [3]], 4)
    assert packed[0]["segments"].tolist() == [1, 1, 2, 0]
    with pytest.raises(IndexError):
        packed[1]
