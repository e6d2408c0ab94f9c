"""Where an accumulation gets its microbatches from."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class MicrobatchInput(NamedTuple):
    """What is known of a microbatch that was read.

    Attributes:
        waited_s: how long the replica waited for it.
        lengths: int32[documents] in it; None: they are unknown.
    """

    waited_s: float
    lengths: np.ndarray | None


class BatchSource(Protocol):
    """The source of microbatches; `data.prefetcher.Prefetcher` is one."""

    def expect(self, wanted: Sequence[tuple[int, int, tuple[int, int]]], /) -> None:
        """Begin to read these (step, index, data shard), in this order."""
        ...

    def get(self, step: int, index: int, data_shard: tuple[int, int], /) -> Any:  # noqa: ANN401 - a user's tree
        """Return this host's rows of a microbatch."""
        ...

    def lengths(self, step: int, index: int, /) -> np.ndarray | None:
        """Return int32[documents], the lengths of the documents in a microbatch; None: they are unknown."""
        ...
