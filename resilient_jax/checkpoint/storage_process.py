"""The storage process: Orbax's only home. It carries out one order after the other.

Usage: process.py SOCKET PARENT. It ends when its worker does: the socket closes, and the kernel kills it.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Final, assert_never

import msgspec

from resilient_jax.checkpoint.messages import (
    Answer,
    Failed,
    Order,
    Read,
    Save,
    Saved,
    Verified,
    Verify,
    WereRead,
)
from resilient_jax.checkpoint.orbax_reader import describe, read
from resilient_jax.checkpoint.orbax_writer import clear_away, write
from resilient_jax.checkpoint.stored_tree import nest, value
from resilient_jax.errors import ResilientJaxError
from resilient_jax.snapshot.fd_connection import FdConnection

PR_SET_PDEATHSIG: Final = 1
NICENESS: Final = 5
REASON_CHARACTERS: Final = 500


def main(descriptor: int, parent: int) -> None:
    """Serves until the worker is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the kernel knew to tell us
    with contextlib.suppress(OSError):  # training goes first
        os.nice(NICENESS)
    link = FdConnection(descriptor)
    orders = msgspec.msgpack.Decoder(Order)
    while messages := link.receive():
        for data in messages:
            _answer(link, orders.decode(data))
            gc.collect()  # Orbax has cycles, and they hold the state


def _answer(link: FdConnection, order: Order) -> None:
    memory = link.take_descriptor() if isinstance(order, Save | Read) else None
    try:
        answer = _carry_out(order, memory)
    except ResilientJaxError as error:
        answer = Failed(reason=str(error))
    except Exception as error:  # the process boundary
        traceback.print_exc()
        answer = Failed(reason=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    if memory is not None:
        os.close(memory)
    link.send(answer)


def _carry_out(order: Order, memory: int | None) -> Answer:
    match order:
        case Save():
            assert memory is not None, "it came with the order"
            return _save(order, memory)
        case Verify():
            leaves, by_digests = describe(Path(order.folder))
            return Verified(leaves=leaves, by_digests=by_digests)
        case Read():
            assert memory is not None, "it came with the order"
            read(Path(order.folder), order.pieces, mmap.mmap(memory, 0))
            return WereRead()
        case _:
            assert_never(order)


def _save(order: Save, memory: int) -> Saved:
    started_s = time.monotonic()
    directory = Path(order.directory)
    numbers = mmap.mmap(memory, 0, prot=mmap.PROT_READ)  # unmapped with the last array on it
    nbytes = write(directory, order.step, nest((leaf.path, value(leaf, numbers)) for leaf in order.leaves))
    clear_away(directory, order.step, order.keep, order.distrusted)
    return Saved(
        step=order.step, nbytes=nbytes or 0, existed=nbytes is None, seconds=time.monotonic() - started_s
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
