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
from collections.abc import Callable, Collection, Iterator, Mapping
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
from resilient_jax.checkpoint.messages import SaveShare
from resilient_jax.checkpoint.orbax_reader import check_readable
from resilient_jax.checkpoint.stored_tree import Tree
from resilient_jax.errors import CheckpointFailed, CheckpointUnreadable

LOCK_FILE: Final = "lock"
CONTENT_FOLDER: Final = "content"


WriteContent = Callable[[Path, Path], Mapping[str, str]]
"""Writes the arrays: takes the temporary folder, and that of the checkpoint below it, to be made. Returns the SHA-256
of the files for which it is known, by their paths below the latter."""


def write_checkpoint(directory: Path, step: int, share: SaveShare, write: WriteContent) -> int | None:
    """Write the checkpoint of a step; return its bytes, or None if a complete one exists.

    Args:
        share: share with the first part. Where other processes write, too, the arrays are written before anybody knows
            whether the step has a complete checkpoint, which stays then.
        write: called with the folders to write into.

    Raises:
        OSError: the storage cannot take it.
        CheckpointFailed: a checkpoint in another layout has the folder of the step; another process failed.
    """
    final = directory / str(step)
    if len(share.hosts) == 1 and final.exists() and _is_readable(final):
        return None
    if find_tree_folder(final) is None and (other := describe_other_layout(final)) is not None:
        raise CheckpointFailed(f"another checkpoint is in the way in {final}: {other}; or move it elsewhere")
    directory.mkdir(parents=True, exist_ok=True)
    with _temporary(directory / f"{step}{TEMPORARY_MARK}-{share.token}") as folder:
        written = folder / CONTENT_FOLDER
        nbytes = write_digests(written, write(folder, written))
        # Files before the rename, or a crash of the machine may leave the final name with half of them; then
        # the directory, or the rename itself may be lost.
        flush_folder(written)
        if final.exists():
            # A complete one is never moved: between two renames there would be none.
            if _is_readable(final):
                return None
            final.rename(folder / "damaged")
        written.rename(final)
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
        step: step that was just saved. Newer checkpoints, of a run that was not resumed, are neither counted nor
            removed.
        max_to_keep: how many of the newest up to `step` to keep.
        distrusted: steps whose checkpoints do not count as kept.
        verified_step: the newest checkpoint of at most so many steps is kept, too.
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


def save_tree(folder: Path, tree: Tree, save_args: Tree, arrays: ocp.type_handlers.NumpyHandler) -> None:
    """Save a tree in a new folder, as an unnamed item.

    Args:
        folder: new folder, to be made.
    """
    # Without an entry for jax.Array Orbax warns.
    type_handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, arrays), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    items = ocp.handlers.DefaultCheckpointHandlerRegistry()
    items.add(ITEM_NAME, ocp.args.PyTreeSave, _ItemHandler(type_handler_registry=type_handlers))
    with contextlib.closing(
        ocp.Checkpointer(ocp.CompositeCheckpointHandler(handler_registry=items))
    ) as checkpointer:
        item = ocp.args.PyTreeSave(tree, save_args=save_args)
        checkpointer.save(folder, args=ocp.args.Composite(**{ITEM_NAME: item}))


def _is_readable(folder: Path) -> bool:
    try:
        check_readable(folder)
    except CheckpointUnreadable:
        return False
    return True


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Make a folder, and yield it; it is locked in the body of the context manager, and removed afterwards."""
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


def flush_folder(folder: Path) -> None:
    """Return when all files below a folder, and their names, are on storage."""
    for path in (*folder.rglob("*"), folder):
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
