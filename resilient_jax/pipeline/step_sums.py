"""The sums of a step that a host needs, as floats, by unit and by block."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from resilient_jax.pipeline.sum_pieces import SumPiece


@dataclasses.dataclass(frozen=True, slots=True)
class PieceSum:
    """The sum of a piece over all microbatches.

    Attributes:
        values: sums in the order of the piece's shapes; floats are float32 at least.
    """

    piece: SumPiece
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepSums:
    """All sums that one host needs.

    Attributes:
        by_piece: by the numbers of pieces, ascending: so those of a unit are in the order of blocks.
    """

    by_piece: Mapping[int, PieceSum]

    def add_up_unit(self, unit: int) -> dict[str, Any]:
        """Return the sums of a unit by name: gradients, and what microbatches make of variables.

        The gradients of a shared weight are those of its blocks, added in their order.
        """
        sums: dict[str, Any] = {}
        for piece_sum in self.by_piece.values():
            if piece_sum.piece.unit == unit:
                for name, value in zip(piece_sum.piece.names, piece_sum.values, strict=False):
                    sums[name] = sums[name] + value if name in sums else value
                sums |= zip(
                    piece_sum.piece.changed_names,
                    piece_sum.values[len(piece_sum.piece.names) :],
                    strict=False,
                )
        return sums

    def list_results(self) -> dict[str, Any]:
        """Return the sums of the results, loss among them, of the blocks whose sums are here."""
        return {
            name: value
            for piece_sum in self.by_piece.values()
            for name, value in zip(
                reversed(piece_sum.piece.result_names), reversed(piece_sum.values), strict=False
            )
        }

    def list_changed(self) -> set[str]:
        """Return the names of the variables whose sums are here, which are no gradients."""
        return {name for piece_sum in self.by_piece.values() for name in piece_sum.piece.changed_names}
