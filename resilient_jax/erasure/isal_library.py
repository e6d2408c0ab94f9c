"""Intel's ISA-L, found and loaded through ctypes: it multiplies and checksums as fast as memory can be read.

The library file is part of the wheel of `pyeclib` (`pip install resilient_jax[isal]`), whose own API is several
times slower and computes different parity; only the file is used. Without the wheel, the system's library serves
(Debian: `libisal2`).
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_jax.erasure.errors import KernelUnavailable

SYSTEM_NAME = "libisal.so.2"
"""The name that the dynamic linker resolves; 2 is the binary interface of the signatures below."""
MAX_CALL_BYTES = 2**30
"""The most bytes of one call. Lengths are C ints, so longer buffers take several calls."""
TABLE_BYTES = 32
"""Bytes of tables for each element of a matrix. Their contents differ between processors: tables must not leave
the process."""

Function = Any
"""A ctypes function, whose type is private."""


@dataclass(frozen=True, slots=True)
class IsalLibrary:
    """The loaded library.

    Attributes:
        path: the file, or the name by which the linker found it.
        init_tables: `ec_init_tables(columns, rows, matrix, tables)`.
        encode_data: `ec_encode_data(length, columns, rows, tables, sources, destinations)`.
        crc32c: `crc32_iscsi(buffer, length, start)`, without the inversion at the end.
    """

    path: str
    init_tables: Function
    encode_data: Function
    crc32c: Function


@functools.cache
def load_isal() -> IsalLibrary:
    """Return the library, loaded once in a process.

    Raises:
        KernelUnavailable: neither the wheel nor the system has the library; the message names what was tried.
    """
    failures: list[str] = []
    for candidate in _candidates():
        try:
            return _declare(ctypes.CDLL(candidate), candidate)
        # OSError: no such file, or one for another processor. AttributeError: the library lacks a function.
        except (OSError, AttributeError) as error:
            failures.append(str(error))
    raise KernelUnavailable(
        f"ISA-L is not on this machine; run `pip install 'resilient_jax[isal]'`. Tried: {'; '.join(failures)}"
    )


def _candidates() -> Iterator[str]:
    # `find_spec` finds the folder without importing the package.
    spec = importlib.util.find_spec("pyeclib")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(str(path) for path in Path(folder).parent.glob("pyeclib.libs/libisal*.so*"))
    yield SYSTEM_NAME


def _declare(library: ctypes.CDLL, origin: str) -> IsalLibrary:
    number, address = ctypes.c_int, ctypes.c_void_p
    # Signatures of ISA-L, version 2 of its binary interface:
    # void ec_init_tables(int k, int rows, uchar *matrix, uchar *tables)
    init_tables = library.ec_init_tables
    init_tables.argtypes, init_tables.restype = (number, number, address, address), None
    # void ec_encode_data(int len, int k, int rows, uchar *tables, uchar **data, uchar **coding)
    encode_data = library.ec_encode_data
    encode_data.argtypes, encode_data.restype = (number, number, number, address, address, address), None
    # unsigned crc32_iscsi(uchar *buffer, int len, unsigned start)
    crc32c = library.crc32_iscsi
    crc32c.argtypes, crc32c.restype = (address, number, ctypes.c_uint32), ctypes.c_uint32
    return IsalLibrary(
        path=origin,
        init_tables=init_tables,
        encode_data=encode_data,
        crc32c=crc32c,
    )
