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
from typing import Final

import msgspec
import numpy as np

from resilient_jax.errors import ResilientJaxError
from resilient_jax.snapshot.link import Link
from resilient_jax.training.trainer.storage.leaves import allocate, lay_out, nest, view
from resilient_jax.training.trainer.storage.messages import Answer, Failed, Load, Loaded, Order, Save, Saved
from resilient_jax.training.trainer.storage.reading import read
from resilient_jax.training.trainer.storage.writing import clear_away, write

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
    link = Link(descriptor)
    orders = msgspec.msgpack.Decoder(Order)
    while messages := link.receive():
        for data in messages:
            _answer(link, orders.decode(data))
            gc.collect()  # Orbax has cycles, and they hold the state


def _answer(link: Link, order: Order) -> None:
    memory = link.take_descriptor() if isinstance(order, Save) else None
    result = None
    try:
        if isinstance(order, Save):
            assert memory is not None
            answer: Answer = _save(order, memory)
        else:
            answer, result = _load(order)
    except ResilientJaxError as error:
        answer = Failed(reason=str(error))
    except Exception as error:  # the process boundary
        traceback.print_exc()
        answer = Failed(reason=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    link.send(answer, [result] if result is not None else [])
    for used in (memory, result):
        if used is not None:
            os.close(used)


def _save(order: Save, memory: int) -> Saved:
    started_s = time.monotonic()
    directory = Path(order.directory)
    numbers = mmap.mmap(memory, 0, prot=mmap.PROT_READ)  # unmapped with the last array on it
    nbytes = write(directory, order.step, nest((leaf.path, view(leaf, numbers)) for leaf in order.leaves))
    clear_away(directory, order.step, order.keep, order.distrusted)
    return Saved(
        step=order.step, nbytes=nbytes or 0, existed=nbytes is None, seconds=time.monotonic() - started_s
    )


def _load(order: Load) -> tuple[Loaded, int]:
    flat, verified = read(Path(order.folder))
    leaves, nbytes = lay_out(flat)
    memory = allocate(nbytes)
    numbers = mmap.mmap(memory, 0)
    for leaf, (_, array) in zip(leaves, flat, strict=True):
        if not leaf.empty:
            np.copyto(view(leaf, numbers), array)
    return Loaded(leaves=leaves, verified=verified), memory


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
