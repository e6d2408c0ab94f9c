"""Where an accumulation gets its microbatches from."""

from collections.abc import Sequence
from typing import Any, Protocol


class BatchSource(Protocol):
    """The source of microbatches; `data.prefetcher.Prefetcher` is one."""

    def expect(self, wanted: Sequence[tuple[int, int, tuple[int, int]]], /) -> None:
        """Begin to read these (step, index, data shard), in this order."""
        ...

    def get(self, step: int, index: int, data_shard: tuple[int, int], /) -> Any:  # noqa: ANN401 - a user's tree
        """Return this host's rows of a microbatch."""
        ...
