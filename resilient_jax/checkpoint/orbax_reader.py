"""Reads a checkpoint with Orbax: its contents, and boxes of its arrays. Only the storage process does this.

Of an array only the chunks that a box touches are decoded, within a budget of bytes: a host that needs a shard of a
state never has all of the state in memory, nor all of a large array. Our own chunks are small (see `orbax_writer`);
plain Orbax writes an array, or the shard of one device, as a single chunk, which is decoded in one piece.
"""

import asyncio
import contextlib
import dataclasses
import logging
import mmap
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from resilient_jax.checkpoint.directory_listing import (
    ITEM_NAME,
    METADATA_FILE,
    describe_other_layout,
    find_tree_folder,
)
from resilient_jax.checkpoint.file_digests import find_damage, has_digests
from resilient_jax.checkpoint.stored_tree import StoredBox, format_orbax_path, view_box
from resilient_jax.errors import CheckpointUnreadable
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.index_box import IndexBox, whole_box
from resilient_jax.state.tree_match import list_leaf_specs

REASON_CHARACTERS: Final = 300
MAX_DECODED_BYTES: Final = 128 * 2**20
"""Bytes of decoded chunks at a time; a larger chunk is decoded alone. Enough to keep all cores busy."""

TakeBox = Callable[[np.ndarray], None]
"""Takes the elements of a box."""


class ByteBudget:
    """A bound on the bytes that coroutines use at a time; a request for more than the limit runs alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._left = limit_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def spend(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are left, and reserve them in the body of the context manager."""
        share = min(nbytes, self._limit)
        async with self._changed:
            await self._changed.wait_for(lambda: self._left >= share)
            self._left -= share
        try:
            yield
        finally:
            async with self._changed:
                self._left += share
                self._changed.notify_all()


def inspect_checkpoint(folder: Path) -> tuple[list[LeafSpec], bool]:
    """Return the arrays of a checkpoint, and whether digests have verified all its files.

    Raises:
        CheckpointUnreadable: the checkpoint is incomplete, damaged or no checkpoint.
    """
    tree_folder = find_tree_folder(folder)
    if tree_folder is None:
        raise CheckpointUnreadable(
            describe_other_layout(folder)
            or f"it has no {ITEM_NAME}/{METADATA_FILE}: it is incomplete, or no checkpoint of Orbax"
        )
    is_verified = has_digests(folder)
    if is_verified and (damage := find_damage(folder)) is not None:
        raise CheckpointUnreadable(damage)
    with _open(folder, _BoxHandler()) as (_, tree):
        return list_leaf_specs(jax.tree.map(_make_abstract, tree), format_orbax_path), is_verified


def read_boxes(folder: Path, boxes: Sequence[StoredBox], memory: mmap.mmap) -> None:
    """Read boxes of a checkpoint's arrays into this memory.

    Raises:
        CheckpointUnreadable: the arrays cannot be read.
    """
    wanted: dict[str, list[tuple[IndexBox, TakeBox]]] = {}
    for stored in boxes:
        target = view_box(stored, memory)
        wanted.setdefault(stored.spec.path, []).append(
            (stored.box, lambda elements, target=target: np.copyto(target, elements))
        )
    _restore(folder, wanted)


def check_readable(folder: Path) -> None:
    """Read every element of a checkpoint that has no digests.

    Raises:
        CheckpointUnreadable: the checkpoint is incomplete, damaged or no checkpoint.
    """
    arrays, is_verified = inspect_checkpoint(folder)
    if not is_verified:
        _restore(folder, {spec.path: [(whole_box(spec.shape), lambda elements: None)] for spec in arrays})


@dataclasses.dataclass
class _BoxArgs(ocp.RestoreArgs):
    """Which boxes of an array to read, and what takes each."""

    boxes: Sequence[tuple[IndexBox, TakeBox]] = ()


class _BoxHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of arrays, which reads boxes and returns nothing."""

    async def deserialize(
        self, infos: Sequence[ocp.type_handlers.ParamInfo], args: Sequence[ocp.RestoreArgs] | None = None
    ) -> Sequence[np.ndarray]:
        budget = ByteBudget(MAX_DECODED_BYTES)
        results = await asyncio.gather(
            *(
                _read_array(info, wanted.boxes, budget)
                for info, wanted in zip(infos, args or (), strict=True)
                if isinstance(wanted, _BoxArgs) and wanted.boxes
            ),
            return_exceptions=True,  # no coroutine may continue after Orbax has closed its loop
        )
        for error in results:
            if error is not None:
                raise error
        return [np.empty(0)] * len(infos)


async def _read_array(
    info: ocp.type_handlers.ParamInfo, boxes: Sequence[tuple[IndexBox, TakeBox]], budget: ByteBudget
) -> None:
    spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=bool(info.is_ocdbt_checkpoint))
    array = await ts.open(ts.Spec(spec), open=True, context=info.ts_context)
    for box, take in boxes:
        async with budget.spend(_decoded_bytes(array, box)):
            take(await array[box.index_within(whole_box(array.shape))].read())


def _decoded_bytes(array: ts.TensorStore, box: IndexBox) -> int:
    """Return the bytes of the chunks that a box touches, and of its own elements."""
    chunk = array.chunk_layout.read_chunk.shape or array.shape
    touched = 1
    for start, stop, size, length in zip(box.start, box.stop, chunk, array.shape, strict=True):
        side = size or length
        # ceil(stop / side) - floor(start / side) chunks along this dim, each `side` long.
        touched *= (-(-stop // side) - start // side) * side
    return (touched + box.size) * array.dtype.numpy_dtype.itemsize


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return whether a log line of Orbax's says anything: an item has no metadata of its own, its step has them."""
    return not str(record.msg).startswith("Metadata file does not exist")


@contextlib.contextmanager
def _filter_orbax_log() -> Iterator[None]:
    log = logging.getLogger("absl")
    log.addFilter(_is_worth_a_line)
    try:
        yield
    finally:
        log.removeFilter(_is_worth_a_line)


@contextlib.contextmanager
def _open(folder: Path, handler: _BoxHandler) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yield a function that restores a tree of arguments, and the tree as Orbax describes it; wrap all errors."""
    tree_folder = find_tree_folder(folder)
    assert tree_folder is not None, "it was inspected before"
    # Every stored leaf was written by one of these handlers; all arrays and scalars are read by ours.
    types = ocp.type_handlers
    scalars, arrays, strings = types.ScalarHandler(), types.ArrayHandler(), types.StringHandler()
    registry = types.create_type_handler_registry(
        *((kind, scalars) for kind in (int, float, bytes, np.number)),
        (np.ndarray, handler),
        (jax.Array, arrays),
        (str, strings),
    )
    orbax = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    try:
        with _filter_orbax_log(), contextlib.closing(ocp.Checkpointer(orbax)) as checkpointer:
            metadata: Any = checkpointer.metadata(tree_folder).item_metadata
            if metadata is None:
                raise CheckpointUnreadable(f"its {METADATA_FILE} does not describe a tree")

            def restore(arguments: Any) -> None:  # noqa: ANN401 - a tree
                checkpointer.restore(tree_folder, args=ocp.args.PyTreeRestore(restore_args=arguments))

            yield restore, metadata.tree
    except CheckpointUnreadable:
        raise
    # Orbax and its readers raise errors of all kinds for bytes in another format.
    except Exception as error:
        raise CheckpointUnreadable(
            f"Orbax cannot read it: {type(error).__name__}: {_shorten(error)}"
        ) from error


def _restore(folder: Path, wanted: Mapping[str, Sequence[tuple[IndexBox, TakeBox]]]) -> None:
    with _open(folder, _BoxHandler()) as (restore, tree):
        restore(
            jax.tree_util.tree_map_with_path(
                lambda path, _: _BoxArgs(
                    restore_type=np.ndarray, boxes=wanted.get(format_orbax_path(path), ())
                ),
                tree,
            )
        )


def _make_abstract(leaf: Any) -> Any:  # noqa: ANN401 - Orbax's description of an array, or of a string
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else None


def _shorten(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:REASON_CHARACTERS]
