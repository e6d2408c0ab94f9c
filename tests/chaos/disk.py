"""A small separate disk for a run folder, which can be filled to the last byte."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

FILLER = "filler-of-the-chaos-campaign"
CHUNK_BYTES = 65_536
# Lazily: a process of the job that was left behind may still have a file open; that is another invariant.
UNMOUNT_AT_END = 'read _; umount -l "$0"'
"""A shell script: `read` returns when no process has the other end of its input, so also after SIGKILL."""


class Disk:
    """A tmpfs that is mounted over a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> Callable[[], None]:
        """Fill the disk to the last byte, and return the function that frees the space."""
        filler = self.folder / FILLER
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * CHUNK_BYTES)
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0")
        return lambda: filler.unlink(missing_ok=True)


@contextlib.contextmanager
def mount_disk(folder: Path, size_mib: int) -> Iterator[Disk]:
    """Mount a disk of that size during the `with` block; at the end its files are copied to `<folder>-kept`.

    If this process is killed, the disk is unmounted without a copy.

    Raises:
        OSError: this process may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0700", "resilient-jax-chaos", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(done.stderr.strip() or "mount failed")
    # In a session of its own, so that a signal to the campaign's group does not end it.
    guard = subprocess.Popen(
        ["sh", "-c", UNMOUNT_AT_END, str(folder)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Disk(folder)
    finally:
        kept = folder.with_name(f"{folder.name}-kept")
        subprocess.run(["cp", "-a", f"{folder}/.", str(kept)], check=False, capture_output=True)
        guard.communicate()
