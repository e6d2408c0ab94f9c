"""Directories that a user names, checked before training begins."""

import os
from pathlib import Path

from resilient_jax.errors import CallerError


def expand_home(directory: str | Path) -> str | Path:
    """Return the directory with the home folder of the user in the place of a leading `~`, as shells have it."""
    return type(directory)(os.path.expanduser(directory))


def check_no_file(directory: str | Path) -> None:
    """Check that a directory can be there: neither it nor one above it is a file.

    Raises:
        CallerError: a file is there.
    """
    path = Path(directory).absolute()
    found = next((one for one in (path, *path.parents) if one.exists()), None)
    if found is not None and not found.is_dir():
        raise CallerError(
            f"checkpoints: found directory={str(directory)!r}, where {found} is a file, expected a directory, "
            "which is made where it is missing. Choose another path"
        )
