"""Writes a checkpoint of which each host has a part, or one host all. Only the storage process does this.

No process sends anything to another: all write into one folder on the storage that they share. Each has Orbax write its
arrays into an OCDBT database of its own, as the processes of one JAX program would. The process with part 0 moves these
databases into its own save, whose end merges them without copying an array:

    DIRECTORY/STEP.orbax-checkpoint-tmp-TOKEN/          made and locked by part 0; the others wait for it
        parts/K.begun                                   the process of part K has found the folder
        parts/K/default/ocdbt.process_K/                the arrays of part K
        parts/K.json                                    part K is complete, or has failed: digests, or the reason
        content/                                        part 0, then all
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.future as orbax_future
import tensorstore as ts

from resilient_jax.checkpoint.directory_listing import ITEM_NAME
from resilient_jax.checkpoint.file_digests import digest_files
from resilient_jax.checkpoint.messages import SaveShare
from resilient_jax.checkpoint.orbax_writer import flush_folder, save_tree
from resilient_jax.checkpoint.part_folder import PartFolder, PartResult
from resilient_jax.checkpoint.stored_tree import PathKey, StoredLeaf, build_tree, make_stand_in
from resilient_jax.errors import CheckpointFailed
from resilient_jax.state.index_box import IndexBox, whole_box

POLL_INTERVAL_S: Final = 0.1
BEGIN_TIMEOUT_S: Final = 120.0
"""Hosts begin within the time of a copy to host memory of each other; a network file system shows new files late."""
CHUNK_BYTES: Final = 8 * 2**20
"""The most bytes of an array in one chunk: a host that reads a shard decodes the chunks that the shard touches. Orbax
splits the largest dims first; each chunk costs time, so much smaller ones are slower."""
HeldLeaf = tuple[StoredLeaf, Sequence[np.ndarray]]
"""A leaf, and the elements of its boxes."""


def write_first_part(
    folder: Path, target: Path, step: int, leaves: Sequence[HeldLeaf], share: SaveShare
) -> Mapping[str, str]:
    """Write the first part, wait for the others, and put them together; see `orbax_writer.WriteContent`.

    Args:
        leaves: all leaves of the tree, each with the boxes that this process has.
    """
    parts = PartFolder(folder.parent, step, share)
    parts.make()
    digests: dict[str, str] = {}

    async def take_parts(item: Path) -> None:
        for number, host in enumerate(share.hosts):
            if number == share.number:
                continue
            found = (await _wait_for_part(parts, number, host)).digests
            name = _name_database(number)
            if found:
                os.rename(parts.get_part(number) / ITEM_NAME / name, item / name)
            digests.update({f"{ITEM_NAME}/{name}/{path}": digest for path, digest in found.items()})

    _save(target, leaves, _BoxHandler(share.number, take_parts), is_complete=True)
    return digests


def write_part(directory: Path, step: int, leaves: Sequence[HeldLeaf], share: SaveShare) -> None:
    """Write another part than the first, and say that it is complete, or why it is not.

    Raises:
        OSError: the storage cannot take it.
        CheckpointFailed: the process with the first part has ended, or failed.
    """
    parts = PartFolder(directory, step, share)
    _await_folder(parts, directory, share)
    try:
        digests: dict[str, str] = {}
        if leaves:
            target = parts.get_part(share.number)
            _save(target, leaves, _BoxHandler(share.number), is_complete=False)
            database = target / ITEM_NAME / _name_database(share.number)
            digests = digest_files(database)
            flush_folder(database)
        parts.put_result(share.number, PartResult(digests=digests))
    except Exception as error:
        if not parts.exists:
            raise CheckpointFailed(f"{share.hosts[0]} has given up the checkpoint of step {step}") from error
        parts.put_error(share.number, f"{type(error).__name__}: {error}")
        raise


def _await_folder(parts: PartFolder, directory: Path, share: SaveShare) -> None:
    until_s = time.monotonic() + BEGIN_TIMEOUT_S
    while not parts.exists:
        if time.monotonic() > until_s:
            raise CheckpointFailed(
                f"found no folder of {share.hosts[0]} in {directory} within {BEGIN_TIMEOUT_S:g} s, expected the same "
                "files on every host: give Checkpoints a directory on a file system that all hosts share"
            )
        time.sleep(POLL_INTERVAL_S)
    parts.begin(share.number)


@dataclasses.dataclass
class _BoxArgs(ocp.SaveArgs):
    """The boxes of an array that this process has, each with its elements; and the grid of those of all processes."""

    grid: tuple[int, ...] = ()
    boxes: Sequence[tuple[IndexBox, np.ndarray]] = ()


class _BoxHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of arrays, which writes boxes of them into a database of this part's own.

    Args:
        finish: called with the folder of the item when the boxes are written, before Orbax merges the databases in it.
    """

    def __init__(self, number: int, finish: Callable[[Path], Awaitable[None]] | None = None) -> None:
        super().__init__(ocdbt_process_id=str(number), deepcopy_host_arrays=False)
        self._process_id = str(number)
        self._finish = finish

    async def serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[orbax_future.Future]:
        # In the background, where Orbax has made the item's folder before.
        work = self._write_all(values, infos, args or ())
        return [orbax_future.CommitFutureAwaitingContractedSignals(work, name="part")]

    async def _write_all(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs],
    ) -> None:
        await asyncio.gather(*(self._write(*given) for given in zip(values, infos, args, strict=True)))
        if self._finish is not None:
            await self._finish(Path(infos[0].parent_dir))

    async def _write(
        self, value: np.ndarray, info: ocp.type_handlers.ParamInfo, wanted: ocp.SaveArgs
    ) -> None:
        assert isinstance(wanted, _BoxArgs), "made by `_save`"
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=value.shape,
            local_shape=wanted.grid,  # which chunks divide
            dtype=value.dtype,
            process_index=self._process_id,
            arg=wanted,
        )
        await info.await_path_creation()
        array = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        whole = whole_box(value.shape)
        for box, elements in wanted.boxes:
            await array[box.index_within(whole)].write(elements, can_reference_source_data_indefinitely=True)


def _save(folder: Path, leaves: Sequence[HeldLeaf], handler: _BoxHandler, *, is_complete: bool) -> None:
    """Save the boxes of leaves.

    Args:
        folder: new folder, to be made.
        is_complete: whether these are all leaves of the tree. If not, a list may have gaps, and is written as a dict:
            the names of arrays are the same.
    """

    def make_path(leaf: StoredLeaf) -> tuple[PathKey, ...]:
        return leaf.path if is_complete else tuple(PathKey(key.name, is_index=False) for key in leaf.path)

    tree = build_tree((make_path(leaf), make_stand_in(leaf)) for leaf, _ in leaves)
    save_args = build_tree((make_path(leaf), _make_args(leaf, elements)) for leaf, elements in leaves)
    save_tree(folder, tree, save_args, handler)


def _make_args(leaf: StoredLeaf, elements: Sequence[np.ndarray]) -> object:
    if leaf.spec is None:
        return make_stand_in(leaf)
    boxes = zip((held.box for held in leaf.boxes), elements, strict=True)
    return _BoxArgs(chunk_byte_size=CHUNK_BYTES, grid=leaf.grid, boxes=tuple(boxes))


async def _wait_for_part(parts: PartFolder, number: int, host: str) -> PartResult:
    """Return how a part ended, if it is complete. The worker ends this process if it takes too long."""
    until_s = time.monotonic() + BEGIN_TIMEOUT_S
    while (result := parts.find_result(number)) is None:
        if time.monotonic() > until_s and not parts.has_begun(number):
            raise CheckpointFailed(
                f"{host} has not begun its part within {BEGIN_TIMEOUT_S:g} s, expected the same files on every host: "
                "give Checkpoints a directory on a file system that all hosts share"
            )
        await asyncio.sleep(POLL_INTERVAL_S)
    if result.error:
        raise CheckpointFailed(f"{host} could not write its part: {result.error}")
    return result


def _name_database(number: int) -> str:
    """Return the name of the folder in which Orbax keeps the arrays of a process."""
    return f"ocdbt.process_{number}"
