"""The folder in which several processes, on several hosts, write one checkpoint together."""

import contextlib
import shutil
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.checkpoint.directory_listing import TEMPORARY_MARK
from resilient_jax.checkpoint.messages import SaveShare
from resilient_jax.protocol.message_decoding import decode_message

PARTS_FOLDER: Final = "parts"


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the writing of a part ended.

    Attributes:
        digests: SHA-256 of the part's files, by their paths in the folder of the part's database.
        error: why the part failed; empty: the part is complete.
    """

    digests: dict[str, str] = {}
    error: str = ""


RESULT_DECODER: Final = msgspec.json.Decoder(PartResult)


class PartFolder:
    """The parts of one save. The process with the first part makes the folder, and removes it.

    Args:
        share: share of one of the processes.
    """

    def __init__(self, directory: Path, step: int, share: SaveShare) -> None:
        self._share = share
        self._path = directory / f"{step}{TEMPORARY_MARK}-{share.token}" / PARTS_FOLDER

    @property
    def exists(self) -> bool:
        """Whether the process with the first part has begun, and neither ended nor failed."""
        return self._path.exists()

    def make(self) -> None:
        """Let the other processes begin."""
        self._path.mkdir()

    def begin(self, number: int) -> None:
        """Show that the process of a part has found this folder."""
        self._get_begun(number).touch()

    def has_begun(self, number: int) -> bool:
        """Return whether the process of a part has found this folder."""
        return self._get_begun(number).exists()

    def get_part(self, number: int) -> Path:
        """Return the folder into which Orbax writes a part."""
        return self._path / str(number)

    def put_result(self, number: int, result: PartResult) -> None:
        """Say that a part is complete, or has failed."""
        path = self._get_result(number)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(result))
        temporary.rename(path)

    def put_error(self, number: int, error: str) -> None:
        """Say why a part has failed, unless it is known or the save is over. What it has written is removed before.

        A full disk may be why it failed.
        """
        if not self.exists or self._get_result(number).exists():
            return
        shutil.rmtree(self.get_part(number), ignore_errors=True)
        with contextlib.suppress(OSError):
            self.put_result(number, PartResult(error=error))

    def find_result(self, number: int) -> PartResult | None:
        """Return how a part ended; None: it has not ended yet.

        Raises:
            MessageError: the result's file is damaged.
        """
        path = self._get_result(number)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return decode_message(RESULT_DECODER, data, str(path))

    def list_missing(self) -> list[str]:
        """Return the hosts that the share's process waits for: of parts that are not complete, or the first one."""
        if self._share.number > 0:
            return [self._share.hosts[0]]
        return [
            host
            for number, host in enumerate(self._share.hosts)
            if number != self._share.number and not self._get_result(number).exists()
        ]

    def _get_begun(self, number: int) -> Path:
        return self._path / f"{number}.begun"

    def _get_result(self, number: int) -> Path:
        return self._path / f"{number}.json"
