"""The messages between a worker and its storage process, over a socket pair.

The arrays are in memory of the worker, whose descriptor goes with the request. Every request gets one reply, in order.
"""

import msgspec

from resilient_jax.checkpoint.stored_tree import StoredBox, StoredLeaf
from resilient_jax.protocol.leaf_spec import LeafSpec


class SaveShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that this process writes.

    Attributes:
        token: the same in all processes of one save, and in no other save.
        number: number of this part. The process with part 0 puts the parts together.
        hosts: hosts of all parts, in the order of the parts' numbers.
    """

    token: str
    number: int
    hosts: tuple[str, ...]


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a checkpoint of the state in the memory that comes with the request, then remove old ones.

    Attributes:
        max_to_keep: how many of the newest checkpoints to keep.
        distrusted: steps whose checkpoints could not be read: these checkpoints do not count as kept.
        verified_step: beside the newest, the newest checkpoint of at most so many steps is kept: no host that computes
            wrongly has touched it. None: nothing is verified.
    """

    directory: str
    step: int
    max_to_keep: int
    distrusted: tuple[int, ...]
    verified_step: int | None
    leaves: list[StoredLeaf]
    share: SaveShare


class SaveReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The checkpoint is on storage.

    Attributes:
        existed: a complete checkpoint of this step was on storage already; nothing was written.
    """

    step: int
    nbytes: int
    duration_s: float
    existed: bool = False


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Verify a checkpoint, and list its arrays."""

    folder: str


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The checkpoint is complete, as far as can be verified without reading its arrays.

    Attributes:
        arrays: all arrays but those without elements.
        has_digests: whether all files of the checkpoint have digests. Without digests damaged arrays are not noticed;
            plain Orbax writes none.
    """

    arrays: list[LeafSpec]
    has_digests: bool


class ReadBoxesRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read these boxes of a checkpoint's arrays into the memory that comes with the request."""

    folder: str
    boxes: list[StoredBox]


class ReadBoxesReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The boxes are in memory."""


class FailureReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to a request that failed."""

    reason: str


Request = SaveRequest | VerifyRequest | ReadBoxesRequest
Reply = SaveReply | VerifyReply | ReadBoxesReply | FailureReply

REQUEST_DECODER: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLY_DECODER: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
