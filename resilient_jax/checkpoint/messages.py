"""What is said between a worker and its storage process, over a socket pair.

The numbers are in memory of the worker's, whose descriptor goes with the order. Every order is answered once, in turn.
"""

import msgspec

from resilient_jax.checkpoint.stored_tree import StoredBox, StoredLeaf


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: write a checkpoint; the state is in the memory that comes with it. Then drop old ones.

    Attributes:
        keep: how many of the newest to keep.
        distrusted: steps whose checkpoints could not be read: they do not count as kept.
    """

    directory: str
    step: int
    max_to_keep: int
    distrusted: tuple[int, ...]
    leaves: list[StoredLeaf]


class SaveReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is on storage.

    Attributes:
        nbytes: of its files.
        seconds: that it took.
        existed: a whole one of this step was there; nothing was written.
    """

    step: int
    nbytes: int
    duration_s: float
    existed: bool = False


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: verify a checkpoint, and say what is in it."""

    folder: str


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is whole, as far as can be told without its numbers.

    Attributes:
        leaves: without places in memory.
        by_digests: of all its files. Without, damaged numbers are not noticed; plain Orbax writes none.
    """

    leaves: list[StoredLeaf]
    has_digests: bool


class ReadBoxesRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: put these boxes of its arrays into the memory that comes with this."""

    folder: str
    boxes: list[StoredBox]


class ReadBoxesReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """They are there."""


class FailureReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order could not be carried out."""

    reason: str


Request = SaveRequest | VerifyRequest | ReadBoxesRequest
Reply = SaveReply | VerifyReply | ReadBoxesReply | FailureReply

REQUEST_DECODER: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLY_DECODER: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
