"""A digest of every file of a checkpoint, in a file beside them.

Orbax 0.12.8 and its OCDBT files find damage in their own tables, by CRC32C, but not in the arrays: of 60 single bits
flipped in the file that holds an array, Orbax restored all 60 without an error. Plain Orbax ignores the digests; they
are in the format of `sha256sum`, so a checkpoint can be checked by hand: `sha256sum -c resilient_jax.sha256`.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from resilient_jax.errors import CheckpointFailed

DIGESTS_FILE: Final = "resilient_jax.sha256"
"""The file's name, in a checkpoint's folder."""
SEPARATOR: Final = "  "


def digest_files(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of all files below `folder`, by their paths below it; those that are known are not read."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    found = known or {}
    return {name: found[name] if name in found else _digest(folder / name) for name in names}


def write_digests(folder: Path, known: Mapping[str, str]) -> int:
    """Write the digests of all files below `folder`; return the bytes of these files.

    Args:
        known: SHA-256 of files that need not be read again, by path.

    Raises:
        CheckpointFailed: one of the known files is not there.
    """
    # Made before the file of the digests exists, which therefore has none of itself.
    digests = digest_files(folder, known)
    if missing := sorted(known.keys() - digests.keys()):
        raise CheckpointFailed(
            f"{folder}: found no {missing[0]}, which another host has written, expected the same files on every host"
        )
    lines = [f"{digest}{SEPARATOR}{name}\n" for name, digest in digests.items()]
    (folder / DIGESTS_FILE).write_text("".join(lines), "utf-8")
    return sum((folder / name).stat().st_size for name in digests)


def has_digests(folder: Path) -> bool:
    """Return whether there are digests: plain Orbax writes none."""
    return (folder / DIGESTS_FILE).is_file()


def find_damage(folder: Path) -> str | None:
    """Return what differs from the digests, as text; None: nothing does. Only files with a digest are read."""
    try:
        lines = (folder / DIGESTS_FILE).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return f"{DIGESTS_FILE} cannot be read ({error})"
    if not lines:
        return f"{DIGESTS_FILE} is empty"
    for line in lines:
        digest, _, name = line.partition(SEPARATOR)
        if not name:
            return f"{DIGESTS_FILE} has a line without a file: {line[:80]!r}"
        path = folder / name
        if not path.is_file():
            return f"the file {name} is missing"
        try:
            found = _digest(path)
        except OSError as error:
            return f"the file {name} cannot be read ({error})"
        if found != digest:
            size = path.stat().st_size
            return f"the file {name} ({size} bytes) has the SHA-256 {found}, but {DIGESTS_FILE} says {digest}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
