"""The folder in which several processes, on several hosts, write one checkpoint together."""

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
        digests: SHA-256 of its files, by their paths in the folder of the part's database.
        error: why it failed; empty: it is complete.
    """

    digests: dict[str, str] = {}
    error: str = ""


RESULT_DECODER: Final = msgspec.json.Decoder(PartResult)


class PartFolder:
    """The parts of one save. The process with the first part makes the folder, and removes it.

    Args:
        directory: of the checkpoints.
        step: of the checkpoint.
        share: of one of the processes.
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

    def get_part(self, number: int) -> Path:
        """Return the folder into which Orbax writes a part."""
        return self._path / str(number)

    def put_result(self, number: int, result: PartResult) -> None:
        """Say that a part is complete, or has failed."""
        path = self._get_result(number)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(result))
        temporary.rename(path)

    def find_result(self, number: int) -> PartResult | None:
        """Return how a part ended; None: it has not ended yet.

        Raises:
            MessageError: the file is damaged.
        """
        path = self._get_result(number)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return decode_message(RESULT_DECODER, data, str(path))

    def list_missing(self) -> list[str]:
        """Return the hosts, other than the share's, whose parts are not complete."""
        return [
            host
            for number, host in enumerate(self._share.hosts)
            if number != self._share.number and not self._get_result(number).exists()
        ]

    def _get_result(self, number: int) -> Path:
        return self._path / f"{number}.json"
