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
        found: dict[str, Any] = {}
        for part in self.by_piece.values():
            if part.piece.unit == unit:
                for name, value in zip(part.piece.names, part.values, strict=False):
                    found[name] = found[name] + value if name in found else value
                found |= zip(part.piece.changed_names, part.values[len(part.piece.names) :], strict=False)
        return found

    def list_results(self) -> dict[str, Any]:
        """Return the sums of the results, loss among them, of the blocks whose sums are here."""
        return {
            name: value
            for part in self.by_piece.values()
            for name, value in zip(reversed(part.piece.result_names), reversed(part.values), strict=False)
        }

    def list_changed(self) -> set[str]:
        """Return the names of the variables whose sums are here, which are no gradients."""
        return {name for part in self.by_piece.values() for name in part.piece.changed_names}
