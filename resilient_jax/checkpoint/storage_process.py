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

from resilient_jax.checkpoint.messages import (
    REQUEST_DECODER,
    FailureReply,
    ReadBoxesReply,
    ReadBoxesRequest,
    Reply,
    Request,
    SaveReply,
    SaveRequest,
    VerifyReply,
    VerifyRequest,
)
from resilient_jax.checkpoint.orbax_reader import inspect_checkpoint, read_boxes
from resilient_jax.checkpoint.orbax_writer import remove_old_checkpoints, write_checkpoint
from resilient_jax.checkpoint.stored_tree import build_tree, view_leaf
from resilient_jax.errors import ResilientJaxError
from resilient_jax.protocol.connection import Connection, Received

PR_SET_PDEATHSIG: Final = 1
NICENESS: Final = 5
REASON_CHARACTERS: Final = 500


def run_storage_process(descriptor: int, parent_pid: int) -> None:
    """Serves until the worker is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # it died before the kernel knew to tell us
    with contextlib.suppress(OSError):  # training goes first
        os.nice(NICENESS)
    link = Connection[Reply, Request](descriptor, REQUEST_DECODER)
    for received in link:
        _answer(link, received)
        gc.collect()  # Orbax has cycles, and they hold the state


def _answer(link: Connection[Reply, Request], received: Received[Request]) -> None:
    order = received.message
    has_memory = isinstance(order, SaveRequest | ReadBoxesRequest)
    memory = received.take_descriptors(1)[0] if has_memory else None
    try:
        answer = _carry_out(order, memory)
    except ResilientJaxError as error:
        answer = FailureReply(reason=str(error))
    except Exception as error:  # the process boundary
        traceback.print_exc()
        answer = FailureReply(reason=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    if memory is not None:
        os.close(memory)
    link.send(answer)


def _carry_out(order: Request, memory: int | None) -> Reply:
    match order:
        case SaveRequest():
            assert memory is not None, "it came with the order"
            return _save(order, memory)
        case VerifyRequest():
            arrays, is_verified = inspect_checkpoint(Path(order.folder))
            return VerifyReply(arrays=arrays, has_digests=is_verified)
        case ReadBoxesRequest():
            assert memory is not None, "it came with the order"
            read_boxes(Path(order.folder), order.boxes, mmap.mmap(memory, 0))
            return ReadBoxesReply()
        case _:
            assert_never(order)


def _save(order: SaveRequest, memory: int) -> SaveReply:
    started_s = time.monotonic()
    directory = Path(order.directory)
    numbers = mmap.mmap(memory, 0, prot=mmap.PROT_READ)  # unmapped with the last array on it
    nbytes = write_checkpoint(
        directory, order.step, build_tree((leaf.path, view_leaf(leaf, numbers)) for leaf in order.leaves)
    )
    remove_old_checkpoints(directory, order.step, order.max_to_keep, order.distrusted)
    return SaveReply(
        step=order.step, nbytes=nbytes or 0, existed=nbytes is None, duration_s=time.monotonic() - started_s
    )


if __name__ == "__main__":
    run_storage_process(int(sys.argv[1]), int(sys.argv[2]))
