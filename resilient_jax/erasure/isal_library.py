"""Intel's ISA-L, found and loaded: it multiplies and checksums as fast as memory can be read.

It lies inside the wheel of `pyeclib` (`pip install resilient_jax[isal]`), whose own API is several times slower
and makes other parity; only the file is used. Without the wheel the system's library will do (Debian:
`libisal2`).
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
"""As the linker knows it; 2 is the binary interface that the signatures below are of."""
MAX_CALL_BYTES = 2**30
"""Lengths are C ints: longer buffers take several calls."""
TABLE_BYTES = 32
"""Of tables for each element of a matrix. What is in them differs between processors: they may not leave the
process."""

Function = Any
"""A function of ctypes, whose type is private."""


@dataclass(frozen=True, slots=True)
class IsalLibrary:
    """The loaded library.

    Attributes:
        origin: the file, or the name that the linker found it by.
        init_tables: `ec_init_tables(columns, rows, matrix, tables)`.
        encode_data: `ec_encode_data(length, columns, rows, tables, sources, destinations)`.
        encode_data_update: the same for one column, given after `rows`, added to the destinations.
        crc32c: `crc32_iscsi(buffer, length, start)`, without the inversion at the end.
    """

    path: str
    init_tables: Function
    encode_data: Function
    encode_data_update: Function
    crc32c: Function


@functools.cache
def load_isal() -> IsalLibrary:
    """The library, loaded once in a process.

    Raises:
        KernelUnavailable: neither the wheel nor the system has it; names what was tried.
    """
    failures: list[str] = []
    for candidate in _candidates():
        try:
            return _declare(ctypes.CDLL(candidate), candidate)
        except (OSError, AttributeError) as error:  # no such file or wrong machine; no such function
            failures.append(str(error))
    raise KernelUnavailable(
        f"ISA-L is not on this machine; run `pip install 'resilient_jax[isal]'`. Tried: {'; '.join(failures)}"
    )


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("pyeclib")  # finds the folder without importing
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(str(path) for path in Path(folder).parent.glob("pyeclib.libs/libisal*.so*"))
    yield SYSTEM_NAME


def _declare(library: ctypes.CDLL, origin: str) -> IsalLibrary:
    number, address = ctypes.c_int, ctypes.c_void_p
    init_tables = library.ec_init_tables
    init_tables.argtypes, init_tables.restype = (number, number, address, address), None
    encode_data = library.ec_encode_data
    encode_data.argtypes, encode_data.restype = (number, number, number, address, address, address), None
    update = library.ec_encode_data_update
    update.argtypes, update.restype = (number, number, number, number, address, address, address), None
    crc32c = library.crc32_iscsi
    crc32c.argtypes, crc32c.restype = (address, number, ctypes.c_uint32), ctypes.c_uint32
    return IsalLibrary(
        path=origin,
        init_tables=init_tables,
        encode_data=encode_data,
        encode_data_update=update,
        crc32c=crc32c,
    )
