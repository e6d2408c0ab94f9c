"""The contents of a directory of checkpoints, by the names of its entries."""

import dataclasses
from pathlib import Path
from typing import Final

METADATA_FILE: Final = "_METADATA"
"""Orbax's description of the tree, one of the last files of a checkpoint."""
TEMPORARY_MARK: Final = ".orbax-checkpoint-tmp"
"""A part of the names of unfinished checkpoints, Orbax's and ours."""
MANAGER_ITEM: Final = "default"
"""The folder in which Orbax's `CheckpointManager` puts the tree, inside of the folder of a step."""
MAX_SHOWN: Final = 5
"""How many foreign names an error lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryListing:
    """The entries of a directory.

    Attributes:
        steps: that have a folder, newest first; whether it can be read is another question.
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
    """Return the folder with the tree of a `Checkpointer` or a `CheckpointManager`; None: there is none."""
    return next(
        (place for place in (folder, folder / MANAGER_ITEM) if (place / METADATA_FILE).is_file()), None
    )
