"""The contents of a directory of checkpoints, by the names of its entries.

The layout is that of Orbax's `CheckpointManager`: DIRECTORY/STEP/default has the tree, and DIRECTORY/STEP what belongs
to the checkpoint as a whole: Orbax's `_CHECKPOINT_METADATA`, and our digests.
"""

import dataclasses
from pathlib import Path
from typing import Final

ITEM_NAME: Final = "default"
"""The folder of the tree in the folder of a step: the name that `CheckpointManager` gives a state that has no name."""
METADATA_FILE: Final = "_METADATA"
"""Orbax's description of the tree, one of the last files of a checkpoint."""
TEMPORARY_MARK: Final = ".orbax-checkpoint-tmp"
"""A part of the names of unfinished checkpoints, Orbax's and ours."""
MAX_SHOWN: Final = 5
"""How many foreign names an error lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryListing:
    """The entries of a directory.

    Attributes:
        steps: steps that have a folder, newest first; whether the checkpoint can be read is another question.
        unfinished: names of folders that a save has left, or is filling.
        foreign: names of other things that may be checkpoints: folders, and files of Orbax. Other files, such as a log,
            and hidden files are ignored.
    """

    steps: tuple[int, ...] = ()
    unfinished: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def find_newest_before(self, step: int | None) -> int | None:
        """Return the newest step below `step`, or the newest of all if `step` is None; None: there is none."""
        return max((s for s in self.steps if step is None or s < step), default=None)


def list_directory(directory: Path) -> DirectoryListing:
    """Return the entries of a directory; none if it does not exist."""
    if not directory.is_dir():
        return DirectoryListing()
    steps: list[int] = []
    unfinished: list[str] = []
    foreign: list[str] = []
    for entry in sorted(directory.iterdir()):
        if TEMPORARY_MARK in entry.name:
            unfinished.append(entry.name)
        elif entry.name.isdecimal() and entry.is_dir():
            steps.append(int(entry.name))
        elif entry.name == METADATA_FILE or (entry.is_dir() and not entry.name.startswith(".")):
            foreign.append(entry.name)
    return DirectoryListing(tuple(sorted(steps, reverse=True)), tuple(unfinished), tuple(foreign))


def find_tree_folder(folder: Path) -> Path | None:
    """Return the folder with the tree of a step's checkpoint; None: there is none."""
    tree_folder = folder / ITEM_NAME
    return tree_folder if (tree_folder / METADATA_FILE).is_file() else None


def describe_other_layout(folder: Path) -> str | None:
    """Return how a step's folder, without a tree where we expect it, keeps trees elsewhere; None: it has none.

    `StandardCheckpointer` puts the tree into the folder itself, and `CheckpointManager` named items into theirs.
    """
    if (folder / METADATA_FILE).is_file():
        return (
            f"its tree is in the folder itself, as StandardCheckpointer saves it, expected it in {ITEM_NAME}/, where "
            f"CheckpointManager has it. Move all of its files into a folder {ITEM_NAME} inside of it"
        )
    if names := sorted(path.parent.name for path in folder.glob(f"*/{METADATA_FILE}")):
        return (
            f"it has the items {', '.join(names[:MAX_SHOWN])}, expected one item, {ITEM_NAME}. Save the whole state "
            "with CheckpointManager.save(step, args=ocp.args.StandardSave(state))"
        )
    return None
