"""The program of a job as it was when the job read it first: copies of its files in the run folder.

1. The agent keeps the script when it starts, and a worker keeps each module of its user's when it first imports it.
2. Who keeps a file first decides: a copy is never written again. So all processes with this run folder run the same
   program, whatever happens to the files that it was read from.
3. Who removes the run folder of a running job removes the copies: agents make them again from the same files.
4. A copy is complete and on the disk before it has its name, and a record of it follows; what a record names is there.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.errors import KeptFileDamaged, MessageError
from resilient_jax.protocol.message_decoding import decode_message

SCRIPT_MODULE: Final = "__main__"
"""The name of the module that a script is."""


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a program.

    Attributes:
        module: name under which the file was imported.
        file: absolute path at which the file was read.
    """

    module: str
    file: str
    digest: str


_DECODER = msgspec.json.Decoder(KeptFile)


class KeptProgram:
    """The files of one program in a run folder.

    Attributes:
        folder: folder of this program alone; readable by its user alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = folder / "records"
        self._copies = folder / "files"
        self._known: dict[str, KeptFile] = {}
        """Records that were read, by the names of their files: they do not change."""

    def create(self) -> None:
        """Create the folder, which the processes of other agents may have done.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self._records, self._copies):
            folder.mkdir(exist_ok=True, mode=0o700)

    def keep(self, module: str, file: str) -> KeptFile:
        """Keep a file as it is on disk now, unless it is kept already.

        Raises:
            OSError: the file cannot be read, or the folder cannot be written.
            KeptFileDamaged: the folder is gone.
        """
        file = os.path.abspath(file)
        name = hashlib.sha256(f"{module}\0{file}".encode()).hexdigest()
        if (known := self._read_record(name)) is not None:
            return known
        if not self._copies.is_dir():
            # Only an agent creates it. If the run folder was removed, what is on disk need not be the job's program.
            raise KeptFileDamaged(
                f"{self._copies}: found no such folder, expected the program of the job. {_ADVICE}"
            )
        copy = self._make_path(file)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            _write_first(copy, Path(file).read_bytes())
        kept = KeptFile(module=module, file=file, digest=_digest(copy.read_bytes()))
        _write_first(self._records / name, msgspec.json.encode(kept))
        return self._read_record(name) or kept

    def read(self, kept: KeptFile) -> bytes:
        """Return the content of a file that is kept.

        Raises:
            KeptFileDamaged: the copy is gone, or has other bytes.
        """
        copy = self._make_path(kept.file)
        try:
            content = copy.read_bytes()
        except OSError as error:
            raise self._damaged(kept, error.strerror or str(error)) from error
        if _digest(content) != kept.digest:
            raise self._damaged(kept, "another content")
        return content

    def find_copy(self, kept: KeptFile) -> str:
        """Return the path of a file's copy."""
        return str(self._make_path(kept.file))

    def list_files(self) -> list[KeptFile]:
        """Return all files that are kept; one that is imported under two names is there twice.

        Raises:
            OSError: the folder cannot be read.
        """
        names = sorted(name for name in os.listdir(self._records) if not name.startswith("."))
        return [record for name in names if (record := self._read_record(name)) is not None]

    def restore(self) -> None:
        """Keep again what this object knows to have been kept, if somebody has removed the folder.

        From the disk, where the files need still be what they were: their digests are known.

        Raises:
            OSError: the folder cannot be written.
            KeptFileDamaged: a file has other bytes on disk now, or is gone.
        """
        lost = {name: kept for name, kept in self._known.items() if not (self._records / name).exists()}
        if not lost:
            return
        self.create()
        for name, kept in lost.items():
            try:
                content = Path(kept.file).read_bytes()
            except OSError as error:
                raise self._damaged(kept, f"nothing, and on disk: {error.strerror}") from error
            if _digest(content) != kept.digest:
                raise self._damaged(kept, "nothing, and another file on disk")
            copy = self._make_path(kept.file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _write_first(copy, content)
            _write_first(self._records / name, msgspec.json.encode(kept))

    def note_change(self, file: str) -> bool:
        """Note that a file has changed on disk; return whether no process with this folder has noted it before.

        Raises:
            OSError: the folder cannot be written.
        """
        noted = self.folder / "changed"
        noted.mkdir(exist_ok=True, mode=0o700)
        return _write_first(noted / hashlib.sha256(file.encode()).hexdigest(), file.encode())

    def _read_record(self, name: str) -> KeptFile | None:
        if name not in self._known:
            try:
                path = self._records / name
                self._known[name] = decode_message(_DECODER, path.read_bytes(), str(path))
            except FileNotFoundError:
                return None
            except (OSError, MessageError) as error:
                raise KeptFileDamaged(
                    f"{self._records / name}: cannot be read: {error}. {_ADVICE}"
                ) from error
        return self._known[name]

    def _make_path(self, file: str) -> Path:
        return self._copies / file.lstrip(os.sep)

    def _damaged(self, kept: KeptFile, found: str) -> KeptFileDamaged:
        return KeptFileDamaged(
            f"{self._make_path(kept.file)}: found {found}, expected {kept.file} as the job read it first. {_ADVICE}"
        )


_ADVICE: Final = (
    "Leave the run folder of a job that runs as it is; to go on, end all agents of the job and start them again, which "
    "begins with the program on disk"
)


def find_changed_files(program: KeptProgram, unchanged: dict[str, tuple[int, ...]]) -> list[KeptFile]:
    """Return the files of a program that are gone from the disk, or have another content there than the copies.

    Args:
        unchanged: what the file system said of files when they had the same content as the copies, by path; updated by
            this call.

    Raises:
        OSError: the program's folder cannot be read.
    """
    changed: dict[str, KeptFile] = {}
    for kept in program.list_files():
        with contextlib.suppress(OSError):
            found = os.stat(kept.file)
            signature = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
            if unchanged.get(kept.file) == signature:
                continue
            if _digest(Path(kept.file).read_bytes()) == kept.digest:
                unchanged[kept.file] = signature
                continue
        changed[kept.file] = kept
    return [changed[file] for file in sorted(changed)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_first(path: Path, content: bytes) -> bool:
    """Write a file that is there completely or not at all; return False if another process has written it before."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".")  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # Else a machine that loses power may leave an empty file under the name, which would be the program.
            os.fsync(file.fileno())
        os.link(unfinished, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(unfinished)
    return True
