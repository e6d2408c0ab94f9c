"""Packing: documents concatenated into rows of one length, so that little is computed for padding.

Rows are filled in the order of the documents: a row is closed when the next document does not fit (next-fit). First-fit
decreasing leaves less padding, but sorts by length: a row then has documents of similar length, and a microbatch of
such rows is not a random sample. In order, neighbors stay neighbors, and documents appended later change no finished
row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from resilient_jax.data.example_layout import Tree
from resilient_jax.data.microbatch_rows import check_integers, check_positive_integers
from resilient_jax.data.random_access import RandomAccessSource, count_items, describe_item, read_item
from resilient_jax.errors import DataError

TOKEN_RANGE = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Which pieces of documents are in which row. A document that fits into a row is one piece.

    Attributes:
        documents: int64[pieces], the index of the document.
        starts: int64[pieces], where in the document the piece begins, in tokens.
        lengths: int32[pieces], in tokens, at least 1.
        row_bounds: int64[rows + 1]; row i has the pieces from `row_bounds[i]` up to `row_bounds[i + 1]`, exclusive.
    """

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    row_bounds: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_bounds) - 1

    def list_pieces(self, row: int) -> range:
        """Return the indices of the pieces in a row."""
        return range(int(self.row_bounds[row]), int(self.row_bounds[row + 1]))


def pack_documents(lengths: npt.ArrayLike, context_length: int) -> Packing:
    """Return which documents are in which row of `context_length` tokens, in their order.

    A document longer than a row is split into pieces of that length and a rest. An empty one is in no row.

    Args:
        lengths: int[documents], in tokens.
        context_length: length of a row, in tokens.

    Raises:
        DataError: the context length is below 1, or a length below 0; one of them is not an integer.
    """
    check_positive_integers(context_length=context_length)
    whole = _read_lengths(lengths)
    if whole.size and whole.min() < 0:
        raise DataError(f"document {int(whole.argmin())}: found length {whole.min()}, expected at least 0")
    counts = -(-whole // context_length)
    documents = np.repeat(np.arange(len(whole)), counts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * context_length
    pieces = np.minimum(whole[documents] - starts, context_length)
    return Packing(
        documents=documents,
        starts=starts,
        lengths=pieces.astype(np.int32),
        row_bounds=_fill(pieces, context_length),
    )


def _read_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return int64[documents]."""
    try:
        found = np.array(lengths, ndmin=1)
    except ValueError as error:
        raise _refuse_lengths(str(error)) from error
    # Without elements any dtype will do: numpy makes an empty list an array of floats.
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise _refuse_lengths(f"{found.dtype}{list(found.shape)}")
    return found.astype(np.int64)


def _refuse_lengths(found: str) -> DataError:
    return DataError(f"document lengths: found {found}, expected integers, one for each document")


def _fill(pieces: npt.NDArray[np.int64], context: int) -> npt.NDArray[np.int64]:
    """Return int64[rows + 1]: the first piece of each row, and the number of pieces."""
    ends = np.cumsum(pieces)
    bounds = [0]
    while bounds[-1] < len(pieces):
        used = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, used + context, side="right")))
    return np.array(bounds, np.int64)


class PackedDocuments:
    """A random-access source of packed rows.

    Each row is a dict of int32[context_length]: `tokens`; `segments`, 0 in padding, else 1, 2, ... by document in this
    row (attend only within one); `positions`, counted from 0 in each piece, 0 in padding.
    """

    def __init__(
        self,
        documents: RandomAccessSource,
        context_length: int,
        pad_token: int = 0,
        *,
        document_lengths: Sequence[int] | None = None,
    ) -> None:
        """Pack the documents, which needs the length of each.

        Args:
            documents: each document is one-dimensional, of integers.
            context_length: length of a row, in tokens.
            pad_token: token that fills the rest of a row.
            document_lengths: the lengths of all documents in tokens, if known; None: each document is read here once,
                at every start of a worker.

        Raises:
            DataError: a document is no row of integers; more or fewer lengths than documents; an invalid number.
        """
        check_integers(pad=pad_token)
        if not TOKEN_RANGE.min <= pad_token <= TOKEN_RANGE.max:
            raise DataError(f"pad: found {pad_token}, expected a 32-bit token")
        self._documents = documents
        self._count = count_items(documents)
        self._context = context_length
        self._pad = pad_token
        if document_lengths is None:
            document_lengths = [len(self._read(number)) for number in range(self._count)]
        self._document_lengths = _read_lengths(document_lengths)
        if len(self._document_lengths) != self._count:
            raise DataError(
                f"document_lengths: found {len(self._document_lengths)}, expected {self._count}, one for each document"
            )
        self._packing = pack_documents(self._document_lengths, context_length)

    def __len__(self) -> int:
        return len(self._packing)

    def __getitem__(self, row: int) -> Tree:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        tokens = np.full(self._context, self._pad, np.int32)
        segments = np.zeros(self._context, np.int32)
        positions = np.zeros(self._context, np.int32)
        first = 0
        for segment, piece in enumerate(self._packing.list_pieces(row), start=1):
            length = int(self._packing.lengths[piece])
            run = slice(first, first + length)
            tokens[run] = self._read_piece(piece)
            segments[run] = segment
            positions[run] = np.arange(length)
            first += length
        return {"tokens": tokens, "segments": segments, "positions": positions}

    def lengths(self, row: int) -> npt.NDArray[np.int32]:
        """Return int32: lengths of the pieces in a row, in tokens, then 1 for each token of padding. Reads no document.

        Padding is computed, too, and takes the time of as many tokens, each of which attends to few others.
        """
        pieces = self._packing.list_pieces(row)
        lengths = self._packing.lengths[pieces.start : pieces.stop]
        return np.append(lengths, np.ones(self._context - int(lengths.sum()), np.int32))

    def _read_piece(self, piece: int) -> np.ndarray:
        number = int(self._packing.documents[piece])
        document = self._read(number)
        if len(document) != self._document_lengths[number]:
            raise DataError(
                f"{describe_item(self._documents, number)}: found {len(document)} tokens, expected "
                f"{self._document_lengths[number]}, its length when the rows were packed"
            )
        start = int(self._packing.starts[piece])
        return document[start : start + int(self._packing.lengths[piece])]

    def _read(self, number: int) -> np.ndarray:
        item = read_item(self._documents, number, self._count)
        try:
            document = np.asarray(item)
        except ValueError as error:
            raise DataError(
                f"{describe_item(self._documents, number)}: found no array ({error}), expected "
                f"tokens: integers, in one "
                "dimension"
            ) from error
        if document.ndim == 1 and not document.size:
            return document.astype(np.int32)  # numpy makes an empty list an array of floats
        if document.ndim != 1 or document.dtype.kind not in "iu":
            raise DataError(
                f"{describe_item(self._documents, number)}: found {document.dtype}{list(document.shape)}, expected "
                "tokens: integers, in one dimension"
            )
        if not np.can_cast(document.dtype, np.int32) and not (
            TOKEN_RANGE.min <= document.min() <= document.max() <= TOKEN_RANGE.max
        ):
            raise DataError(
                f"{describe_item(self._documents, number)}: found tokens from {document.min()} to {document.max()}, "
                "expected 32-bit ones"
            )
        return document
