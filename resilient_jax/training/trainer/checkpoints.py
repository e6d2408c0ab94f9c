"""When to save the training state on storage, and where."""

import dataclasses
from pathlib import Path

from resilient_jax.errors import CallerError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When to save the training state, in Orbax's format.

    One host saves, while the others wait for it in the next step. A job in which nothing is committed yet goes on from
    the newest complete checkpoint; after that, failures never touch the storage.

    Attributes:
        directory: the same files on every host (a network or cluster file system), unless there is only one.
        every: steps between two; the last step is saved, too.
        keep: how many of the newest to keep.

    Raises:
        CallerError: a number is below 1.
    """

    directory: str | Path
    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise CallerError(
                f"checkpoints: found every={self.every}, keep={self.keep}, expected numbers of at least 1"
            )

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save when `step` steps are committed, of `last`."""
        return step % self.every == 0 or step == last
