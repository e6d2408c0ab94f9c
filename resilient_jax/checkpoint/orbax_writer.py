"""Writes a checkpoint with plain Orbax, and removes old ones. Only the storage process does this.

The files are those that Orbax's `CheckpointManager` writes for an unnamed item, and the digests. A checkpoint is
written in a temporary folder, with its digests, and flushed; then one rename makes it count. A writer that dies before
leaves a folder whose name says that it is unfinished. A live writer has a lock on its folder; the next writer removes
unfinished folders without a lock.
"""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import jax
import numpy as np
import orbax.checkpoint as ocp

from resilient_jax.checkpoint.directory_listing import (
    ITEM_NAME,
    TEMPORARY_MARK,
    describe_other_layout,
    find_tree_folder,
    list_directory,
)
from resilient_jax.checkpoint.file_digests import write_digests
from resilient_jax.checkpoint.orbax_reader import check_readable
from resilient_jax.checkpoint.stored_tree import Tree
from resilient_jax.errors import CheckpointFailed, CheckpointUnreadable

LOCK_FILE: Final = "lock"
CONTENT_FOLDER: Final = "content"
CHUNK_BYTES: Final = 8 * 2**20
"""The most bytes of an array in one chunk: a host that reads a shard decodes the chunks that the shard touches. Orbax
splits the largest dims first; each chunk costs time, so much smaller ones are slower."""


def write_checkpoint(directory: Path, step: int, tree: Tree) -> int | None:
    """Write the checkpoint of a step; return its bytes, or None if a complete one exists.

    Raises:
        OSError: the storage cannot take it.
        CheckpointFailed: a checkpoint in another layout has the folder of the step.
    """
    final = directory / str(step)
    if final.exists() and _is_readable(final):
        return None
    if find_tree_folder(final) is None and (other := describe_other_layout(final)) is not None:
        raise CheckpointFailed(f"another checkpoint is in the way in {final}: {other}; or move it elsewhere")
    directory.mkdir(parents=True, exist_ok=True)
    with _temporary(directory, step) as folder:
        content = folder / CONTENT_FOLDER
        _save(content, tree)
        nbytes = write_digests(content)
        # Files before the rename, or a crash of the machine may leave the final name with half of them; then
        # the directory, or the rename itself may be lost.
        _flush(content)
        if final.exists():  # and damaged: replace it, now that there is a better one
            final.rename(folder / "damaged")
        content.rename(final)
        _flush_one(directory)
    return nbytes


def remove_old_checkpoints(
    directory: Path,
    step: int,
    max_to_keep: int,
    distrusted: Collection[int],
    verified_step: int | None = None,
) -> None:
    """Remove old checkpoints, and what dead writers have left.

    Args:
        directory: of the checkpoints.
        step: that was just saved. Newer ones, of a run that was not resumed, are neither counted nor removed.
        max_to_keep: the newest of those up to `step`.
        distrusted: steps that do not count as kept.
        verified_step: the newest of at most so many steps is kept, too.
    """
    found = [
        s
        for s in list_directory(directory).steps
        if s <= step and find_tree_folder(directory / str(s)) is not None
    ]
    trusted = [s for s in found if s not in distrusted]
    kept = trusted[:max_to_keep]
    verified = [s for s in trusted if verified_step is not None and s <= verified_step][:1]
    # Distrusted ones that are newer than those kept stay; if there is none to keep, nothing is removed.
    for old in (s for s in found if s < min(kept, default=0) and s not in verified):
        # Renamed first: a half-removed checkpoint must not look like one.
        (directory / str(old)).rename(directory / f"{old}{TEMPORARY_MARK}-old")
    for name in list_directory(directory).unfinished:
        if not _is_being_written(directory / name):
            shutil.rmtree(directory / name, ignore_errors=True)


class _ItemHandler(ocp.PyTreeCheckpointHandler):
    """Orbax's handler of trees, which writes that the checkpoint is of `StandardCheckpointHandler`.

    Both write the same files, and only the former takes type handlers. By the name that is written, a plain
    `CheckpointManager` chooses its handler: by that of the former it would refuse `StandardRestore` after a `restore`
    without arguments.
    """

    @classmethod
    def typestr(cls) -> str:
        return ocp.StandardCheckpointHandler.typestr()


def _save(folder: Path, tree: Tree) -> None:
    # No copy of the arrays: they do not change before the save is done. Without an entry for jax.Array Orbax warns.
    handler_of_numpy = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    arrays = ocp.type_handlers.ArrayHandler()
    type_handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, handler_of_numpy), (jax.Array, arrays)
    )
    items = ocp.handlers.DefaultCheckpointHandlerRegistry()
    items.add(ITEM_NAME, ocp.args.PyTreeSave, _ItemHandler(type_handler_registry=type_handlers))
    with contextlib.closing(
        ocp.Checkpointer(ocp.CompositeCheckpointHandler(handler_registry=items))
    ) as checkpointer:
        how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
        item = ocp.args.PyTreeSave(tree, save_args=how)
        checkpointer.save(folder, args=ocp.args.Composite(**{ITEM_NAME: item}))


def _is_readable(folder: Path) -> bool:
    try:
        check_readable(folder)
    except CheckpointUnreadable:
        return False
    return True


@contextlib.contextmanager
def _temporary(directory: Path, step: int) -> Iterator[Path]:
    """Yield a folder of this process alone, locked in the body of the context manager."""
    folder = directory / f"{step}{TEMPORARY_MARK}-{socket.gethostname()}-{os.getpid()}"
    folder.mkdir()
    try:
        with (folder / LOCK_FILE).open("w") as lock:
            # On a file system without locks other writers may remove the folder.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_being_written(folder: Path) -> bool:
    try:
        with (folder / LOCK_FILE).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock: Orbax's own, or half removed
        return False
    return False


def _flush(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
