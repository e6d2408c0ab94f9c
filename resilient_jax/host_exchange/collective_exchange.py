"""An exchange over one small all-reduce: each host fills in its own row, so the sum over hosts has the rows of all.

A row is the length of a message and its bytes, as int32. The sums are exact, since at most one host has given a number
other than 0. The vector's size follows from the room for a message and the number of rows, not from what is said. So
few programs are compiled, and all hosts enter the same one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from resilient_jax.errors import MessageError
from resilient_jax.host_exchange.messages import SMALL_BYTES, MessageT
from resilient_jax.ids import HostName
from resilient_jax.protocol.message_decoding import decode_message

VECTOR_WORDS: Final = 256
"""Vectors have a multiple of this size: mostly the same for fewer hosts, whose all-reduce is then compiled already."""
MAX_MESSAGE_BYTES: Final = 2**24
"""A longer message is no message: rows were added up that belong to different exchanges."""
WORD_BYTES: Final = np.dtype(np.int32).itemsize


class AddingWorld(Protocol):
    """The attributes and methods of the world that are used here."""

    hosts: tuple[HostName, ...]

    @property
    def host_index(self) -> int:
        """This host's index in `hosts`."""
        ...

    def all_reduce(self, tree: Any) -> Any:  # noqa: ANN401 - a tree of small numpy arrays
        """Return the sum of a tree over all hosts."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveExchange:
    """The exchanges of one generation whose world forms collectives; see `HostExchange`.

    Attributes:
        host_index: index of this host in the generation.
        num_hosts: hosts of the generation.
        all_reduce: returns the sum over hosts of an int32 vector; all hosts must call it.
    """

    host_index: int
    num_hosts: int
    all_reduce: Callable[[np.ndarray], Any]

    @classmethod
    def between_hosts(cls, world: AddingWorld) -> "CollectiveExchange":
        """Return the exchange between all live hosts of a world."""
        return cls(world.host_index, len(world.hosts), world.all_reduce)

    def gather(
        self, message: MessageT, *, speakers: Sequence[int] | None = None, room_bytes: int = SMALL_BYTES
    ) -> list[MessageT]:
        """Return the messages of all speakers; see `HostExchange.gather`."""
        speaking = tuple(range(self.num_hosts)) if speakers is None else tuple(speakers)
        data = msgspec.msgpack.encode(message)
        rows = self._add_rows(data, speaking, room_bytes)
        longest = int(rows[:, 0].max())
        if longest > room_bytes:
            # All hosts have read the same lengths, so all go into the second round, or none.
            rows = self._add_rows(data, speaking, 1 << (longest - 1).bit_length())
        if not longest:
            # A rehearsal: collectives are loaded, not run, and give zeros. The others would say what this host does.
            return [message] * len(speaking)
        decoder: Any = msgspec.msgpack.Decoder(type(message))
        return [
            decode_message(decoder, row[1:].tobytes()[: row[0]], f"what host {speaker} of a world said")
            for speaker, row in zip(speaking, rows, strict=True)
        ]

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over hosts of an int32 array, which travels in a vector of a usual size."""
        vector = np.zeros(_round_up(values.size), np.int32)
        vector[: values.size] = values.reshape(-1)
        # A copy: on CPU np.asarray would be a view, which keeps the backend after a re-form.
        return np.array(self.all_reduce(vector))[: values.size].reshape(values.shape)

    def _add_rows(self, data: bytes, speakers: tuple[int, ...], room_bytes: int) -> np.ndarray:
        """Return int32[speakers, row words]. Of a message without room only the length is said."""
        rows = np.zeros((len(speakers), _count_row_words(room_bytes)), np.int32)
        if self.host_index in speakers:
            rows[speakers.index(self.host_index)] = pack_row(data, room_bytes)
        total = self.add_up(rows)
        lengths = total[:, 0]
        if lengths.any() and not 0 < lengths.min() <= lengths.max() <= MAX_MESSAGE_BYTES:
            raise MessageError(
                f"an exchange between hosts: found messages of {lengths.tolist()} bytes, expected 1 to "
                f"{MAX_MESSAGE_BYTES} of each. Every host must make the same calls in the same order, and run the "
                "same version of resilient_jax"
            )
        return total


def compute_vector_size(num_speakers: int, room_bytes: int) -> int:
    """Return the size, in int32 words, of the vector in which messages of speakers travel."""
    return _round_up(num_speakers * _count_row_words(room_bytes))


def _round_up(num_words: int) -> int:
    return -(-num_words // VECTOR_WORDS) * VECTOR_WORDS


def _count_row_words(room_bytes: int) -> int:
    return 1 + -(-room_bytes // WORD_BYTES)


def pack_row(data: bytes, room_bytes: int) -> np.ndarray:
    """Return int32[row words], the row of a message; of one that is too long it has the length alone."""
    row = np.zeros(_count_row_words(room_bytes), np.int32)
    row[0] = len(data)
    if len(data) <= room_bytes:
        row[1:].view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return row
