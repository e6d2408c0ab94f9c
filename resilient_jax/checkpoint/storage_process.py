"""The storage process, the only one that imports Orbax. It serves one request after the other.

Usage: storage_process.py SOCKET PARENT. It ends with its worker: the socket closes, and the kernel kills the process.
"""

import contextlib
import ctypes
import functools
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
from resilient_jax.checkpoint.part_writer import write_first_part, write_part
from resilient_jax.checkpoint.stored_tree import view_boxes
from resilient_jax.errors import ResilientJaxError
from resilient_jax.notices import ignore_notices
from resilient_jax.protocol.connection import Connection, Received

PR_SET_PDEATHSIG: Final = 1
NICENESS: Final = 5
REASON_CHARACTERS: Final = 500


def run_storage_process(descriptor: int, parent_pid: int) -> None:
    """Serve until the worker has ended."""
    ignore_notices()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return  # the worker died before the call to prctl
    with contextlib.suppress(OSError):  # training has priority
        os.nice(NICENESS)
    connection = Connection[Reply, Request](descriptor, REQUEST_DECODER)
    for received in connection:
        _reply_to(connection, received)
        gc.collect()  # Orbax has reference cycles, which keep the state in memory


def _reply_to(connection: Connection[Reply, Request], received: Received[Request]) -> None:
    request = received.message
    has_memory = isinstance(request, SaveRequest | ReadBoxesRequest)
    memory: int | None = None
    try:
        memory = received.take_descriptors(1)[0] if has_memory else None
        reply = _execute(request, memory)
    except ResilientJaxError as error:
        reply = FailureReply(reason=str(error))
    except Exception as error:  # the process boundary
        traceback.print_exc()
        reply = FailureReply(reason=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    if memory is not None:
        os.close(memory)
    connection.send(reply)


def _execute(request: Request, memory: int | None) -> Reply:
    match request:
        case SaveRequest():
            assert memory is not None, "it comes with the request"
            return _save(request, memory)
        case VerifyRequest():
            arrays, is_verified = inspect_checkpoint(Path(request.folder))
            return VerifyReply(arrays=arrays, has_digests=is_verified)
        case ReadBoxesRequest():
            assert memory is not None, "it comes with the request"
            read_boxes(Path(request.folder), request.boxes, mmap.mmap(memory, 0))
            return ReadBoxesReply()
        case _:
            assert_never(request)


def _save(request: SaveRequest, memory: int) -> SaveReply:
    started_s = time.monotonic()
    directory = Path(request.directory)
    mapped = mmap.mmap(memory, 0, prot=mmap.PROT_READ)  # unmapped with the last array over it
    share = request.share
    held = [(leaf, view_boxes(leaf, mapped)) for leaf in request.leaves]
    if share.number > 0:
        write_part(directory, request.step, held, share)
        return SaveReply(step=request.step, nbytes=0, duration_s=time.monotonic() - started_s)
    write = functools.partial(write_first_part, step=request.step, leaves=held, share=share)
    nbytes = write_checkpoint(directory, request.step, share, write)
    remove_old_checkpoints(
        directory, request.step, request.max_to_keep, request.distrusted, request.verified_step
    )
    return SaveReply(
        step=request.step, nbytes=nbytes or 0, existed=nbytes is None, duration_s=time.monotonic() - started_s
    )


if __name__ == "__main__":
    run_storage_process(int(sys.argv[1]), int(sys.argv[2]))
