"""Validation of the buffers of a kernel, before a byte is read or written.

A kernel reads and writes memory by address, so its operands must be one dimension of bytes, contiguous and of equal
length, with destinations that are writable and overlap no other buffer (a kernel writes the first destination before
it has read the last source).
"""

import bisect
import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from resilient_jax.erasure.errors import ErasureCodeError

Buffer = Any
"""An object with the buffer protocol (bytes, bytearray, memoryview, mmap, numpy), a type that Python 3.11 cannot
express."""

BYTE_FORMATS = frozenset("Bbc")
"""The format codes of `struct` for bytes, unsigned and signed."""


class Operands(NamedTuple):
    """Checked buffers and their addresses; the views keep the memory alive.

    Attributes:
        sources: memory to read, `length` bytes each.
        destinations: memory to write, `length` bytes each.
    """

    sources: tuple[memoryview, ...]
    destinations: tuple[memoryview, ...]
    source_addresses: tuple[int, ...]
    destination_addresses: tuple[int, ...]
    length: int


def check_operands(sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Operands:
    """Return views and addresses of buffers that fit each other.

    A source may occur twice, and may overlap another source.

    Raises:
        ErasureCodeError: a buffer is not contiguous bytes of one dimension, lengths differ, a destination is read-only
            or overlaps another buffer, or there is no source.
    """
    if not sources:
        raise ErasureCodeError("found no source, expected at least one")
    readable = tuple([_view(buffer, "source", i) for i, buffer in enumerate(sources)])
    writable = tuple(
        [_view(buffer, "destination", i, writable=True) for i, buffer in enumerate(destinations)]
    )
    lengths = [*map(len, readable), *map(len, writable)]
    if lengths.count(lengths[0]) < len(lengths):
        raise ErasureCodeError(
            f"buffers of unequal length: found sources of {lengths[: len(readable)]} and destinations of "
            f"{lengths[len(readable) :]} bytes, expected one length; pad the short ones with zeros"
        )
    operands = Operands(
        sources=readable,
        destinations=writable,
        source_addresses=tuple(map(_address, readable)),
        destination_addresses=tuple(map(_address, writable)),
        length=lengths[0],
    )
    _refuse_overlap(operands)
    return operands


def view_bytes(buffer: Buffer, name: str, *, writable: bool = False) -> memoryview:
    """Return the buffer as a flat view of bytes; `name` is for the message.

    Raises:
        ErasureCodeError: the buffer has no such view, or is read-only although `writable` is set.
    """
    try:
        view = memoryview(buffer)
    # The class depends on the type: numpy raises ValueError for bfloat16, which the protocol cannot describe.
    except (TypeError, ValueError, BufferError) as error:
        raise ErasureCodeError(
            f"{name}: found {type(buffer).__name__}, expected a buffer of bytes, as `array.view(numpy.uint8)` is "
            f"({error})"
        ) from error
    if view.ndim != 1 or view.format not in BYTE_FORMATS:
        raise ErasureCodeError(
            f"{name}: found {view.ndim} dimensions of format {view.format!r}, expected one dimension of bytes; give "
            f"`array.reshape(-1).view(numpy.uint8)`"
        )
    if not view.c_contiguous:
        raise ErasureCodeError(
            f"{name}: found strides of {view.strides} bytes, expected contiguous memory; copy it first"
        )
    if writable and view.readonly:
        raise ErasureCodeError(f"{name}: found read-only memory, expected memory to write the result to")
    return view if view.format == "B" else view.cast("B")


def _view(buffer: Buffer, role: str, index: int, *, writable: bool = False) -> memoryview:
    # The fast path for nearly every buffer: at 1 MiB a shard these checks are a few percent of the time.
    if type(buffer) is memoryview or type(buffer) is bytearray:
        view = memoryview(buffer)
        if view.format == "B" and view.ndim == 1 and view.c_contiguous and not (writable and view.readonly):
            return view
    return view_bytes(buffer, f"{role} {index}", writable=writable)


def _refuse_overlap(operands: Operands) -> None:
    length = operands.length
    if not length:
        return
    apart = sorted(operands.source_addresses + operands.destination_addresses)
    if all([following - start >= length for start, following in pairwise(apart)]):
        return
    # Only sources may overlap each other.
    starts = sorted(operands.destination_addresses)
    if any(following < start + length for start, following in pairwise(starts)):
        raise ErasureCodeError("destinations overlap each other, expected separate memory for each")
    for i, source in enumerate(operands.source_addresses):
        # The first destination that ends after the source starts: start + length > source.
        following = bisect.bisect_right(starts, source - length)
        if following < len(starts) and starts[following] < source + length:
            raise ErasureCodeError(f"source {i} overlaps a destination, expected that only sources are read")


class _PyBuffer(ctypes.Structure):
    """`Py_buffer`, part of Python's stable binary interface since 3.11 (PEP 384 list, "Buffer protocol")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_PYBUF_SIMPLE = 0
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def _address(view: memoryview) -> int:
    """Return the address of the view's bytes, which is valid while the view exists: the view pins the memory."""
    if not view.readonly and view.nbytes:
        # Three times as fast as the general way below.
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    raw = _PyBuffer()
    # Raises BufferError itself.
    _get_buffer(view, raw, _PYBUF_SIMPLE)
    try:
        return raw.buf or 0
    finally:
        _release_buffer(raw)
