"""What is said between a worker and its storage process, over a socket pair.

The numbers are in memory whose descriptor goes with the message. Every order is answered once, in turn.
"""

import msgspec

from resilient_jax.training.trainer.storage.leaves import Leaf


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: write a checkpoint; the state is in the memory that comes with it. Then drop old ones.

    Attributes:
        keep: how many of the newest to keep.
        distrusted: steps whose checkpoints could not be read: they do not count as kept.
    """

    directory: str
    step: int
    keep: int
    distrusted: tuple[int, ...]
    leaves: list[Leaf]


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is on storage.

    Attributes:
        nbytes: of its files.
        seconds: that it took.
        existed: a whole one of this step was there; nothing was written.
    """

    step: int
    nbytes: int
    seconds: float
    existed: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order: verify and read a checkpoint."""

    folder: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is whole; the numbers are in the memory that comes with this.

    Attributes:
        verified: by digests. Without, damaged numbers are not noticed; plain Orbax writes none.
    """

    leaves: list[Leaf]
    verified: bool


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order could not be carried out."""

    reason: str


Order = Save | Load
Answer = Saved | Loaded | Failed
