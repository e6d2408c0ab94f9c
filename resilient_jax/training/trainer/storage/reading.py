"""Reads a checkpoint with plain Orbax. Only the storage process does this."""

import contextlib
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import orbax.checkpoint as ocp

from resilient_jax.errors import CheckpointUnreadable
from resilient_jax.training.trainer.storage.digests import find_damage, has_digests
from resilient_jax.training.trainer.storage.folders import METADATA, find_tree
from resilient_jax.training.trainer.storage.leaves import Key, flatten

REASON_CHARACTERS: Final = 300


def read(folder: Path) -> tuple[list[tuple[tuple[Key, ...], Any]], bool]:
    """The leaves of a checkpoint, and whether digests have vouched for them.

    Raises:
        CheckpointUnreadable: it is incomplete, damaged or none.
    """
    place = find_tree(folder)
    if place is None:
        raise CheckpointUnreadable(f"it has no {METADATA}: it is incomplete, or no checkpoint of Orbax")
    verified = has_digests(folder)
    if verified and (damage := find_damage(folder)) is not None:
        raise CheckpointUnreadable(damage)
    try:
        with contextlib.closing(ocp.PyTreeCheckpointer()) as checkpointer:
            metadata: Any = checkpointer.metadata(place).item_metadata
            if metadata is None:
                raise CheckpointUnreadable(f"its {METADATA} does not describe a tree")
            arguments = jax.tree.map(_as_numpy, metadata.tree)
            tree = checkpointer.restore(place, restore_args=arguments)
    except CheckpointUnreadable:
        raise
    except Exception as error:  # whatever Orbax and its readers say to bytes that are not theirs
        raise CheckpointUnreadable(
            f"Orbax cannot read it: {type(error).__name__}: {_shorten(error)}"
        ) from error
    return flatten(tree), verified


def _as_numpy(leaf: Any) -> ocp.RestoreArgs:  # noqa: ANN401 - Orbax's description of an array, or of a string
    return ocp.RestoreArgs(restore_type=np.ndarray) if hasattr(leaf, "shape") else ocp.RestoreArgs()


def _shorten(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:REASON_CHARACTERS]
