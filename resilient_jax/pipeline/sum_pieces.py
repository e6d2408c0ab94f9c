"""What is summed over microbatches, in pieces that some hosts compute and some need, and the sums.

A *piece* is the gradients of one block for the weights of one unit, and what the block makes of variables of that unit
that the loss changes; the other results of the block's forward pass (loss, metrics) are in the piece of its own unit.
Hosts that run the block compute it, hosts that hold the unit need it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.blocks.loss_trace import CHANGED
from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_runner import LOSS
from resilient_jax.pipeline.state_units import StateUnit
from resilient_jax.pipeline_schedule.routes import Routes
from resilient_jax.weighted_mean import join_weights


class PieceValues(NamedTuple):
    """What a piece has of a microbatch, by name; or the sums of that, or their shapes.

    Attributes:
        gradients: values for trained weights.
        changed: values for variables that are not trained.
        results: other results of the block.
    """

    gradients: Mapping[str, Any]
    changed: Mapping[str, Any]
    results: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumPiece:
    """Gradients of a block for the weights of a unit.

    Attributes:
        number: index of the piece, the same on all hosts.
        block: block whose passes make the addends.
        unit: number of the unit.
        shapes: shapes of one microbatch's addend.
    """

    number: int
    block: int
    unit: int
    shapes: PieceValues

    def select(self, gradients: Mapping[str, Any], results: Mapping[str, Any]) -> list[Any]:
        """Return the addend of a microbatch: without names, so that equal layers share programs."""
        found = PieceValues(
            {name: gradients[name] for name in self.shapes.gradients},
            {name: results[f"{CHANGED}/{name}"] for name in self.shapes.changed},
            {name: results[name] for name in self.shapes.results},
        )
        return jax.tree.leaves(found)

    def name(self, sums: Sequence[Any]) -> PieceValues:
        """Return what is in the order of `select` by name."""
        return jax.tree.structure(self.shapes).unflatten(sums)


@dataclasses.dataclass(frozen=True, slots=True)
class StepSums:
    """All sums that one host needs.

    Attributes:
        pieces: each with its sums over all microbatches, as floats of 32 bits at least; by number, ascending: so those
            of a unit are in the order of blocks.
    """

    pieces: Sequence[tuple[SumPiece, PieceValues]]

    def add_up_unit(self, unit: int) -> dict[str, Any]:
        """Return the sums of a unit by name: gradients, and what microbatches make of variables.

        The gradients of a shared weight are those of its blocks, added in their order.
        """
        sums: dict[str, Any] = {}
        for piece, values in self.pieces:
            if piece.unit == unit:
                for name, value in values.gradients.items():
                    sums[name] = sums[name] + value if name in sums else value
                sums |= values.changed
        return sums

    def list_results(self) -> dict[str, Any]:
        """Return the sums of the results, loss among them, of the blocks whose sums are here."""
        return {name: value for _, values in self.pieces for name, value in values.results.items()}

    def list_changed(self) -> set[str]:
        """Return the names of the variables whose sums are here, which are no gradients."""
        return {name for _, values in self.pieces for name in values.changed}


def list_sum_pieces(cut: CutModel, units: Sequence[StateUnit]) -> tuple[SumPiece, ...]:
    """Return all pieces of a model."""
    outputs = dict(zip(cut.trace.result_names, cut.trace.closed.out_avals, strict=True))
    changed = cut.changed_variables
    found: list[SumPiece] = []
    for number, unit in enumerate(units):
        makers = {changed[weight.name][0] for weight in unit.weights if weight.name in changed}
        for block in sorted({*unit.blocks, *makers}):
            shapes = PieceValues(
                {w.name: w.describe() for w in unit.weights if w.is_trained and block in unit.blocks},
                {
                    w.name: changed[w.name][1]
                    for w in unit.weights
                    if changed.get(w.name, (None,))[0] == block
                },
                {
                    name: jax.ShapeDtypeStruct(outputs[name].shape, outputs[name].dtype)
                    for name in (_list_results(cut, block) if unit.blocks == (block,) else ())
                },
            )
            found.append(SumPiece(number=len(found), block=block, unit=number, shapes=shapes))
    return tuple(found)


def list_scalar_results(cut: CutModel) -> list[str]:
    """Return the names of the means in a commit table, that of the loss among them."""
    outputs = dict(zip(cut.trace.result_names, cut.trace.closed.out_avals, strict=True))
    names = [name for block in range(cut.num_blocks) for name in _list_results(cut, block)]
    return list(join_weights(dict.fromkeys(name for name in names if outputs[name].shape == ())))


def _list_results(cut: CutModel, block: int) -> tuple[str, ...]:
    """Return the results of a block that are no changed variables."""
    names = cut.blocks[block].programs.result_names
    names = tuple(name for name in names if not name.startswith(f"{CHANGED}/"))
    return (*names, LOSS) if block + 1 == cut.num_blocks else names


@dataclasses.dataclass(frozen=True, slots=True)
class SumLayout:
    """Which hosts contribute to which sums, and which need them.

    Attributes:
        routes: one route for each microbatch, ascending.
        holders: the living hosts that have each block.
        units: all units of the model, by number.
    """

    routes: Routes
    holders: Sequence[Collection[HostName]]
    units: Sequence[StateUnit]

    def list_first_microbatches(self, block: int) -> dict[HostName, int]:
        """Return for each host that runs a block the first of its microbatches, which names its contribution."""
        found: dict[HostName, int] = {}
        for route in self.routes:  # by microbatch, ascending
            host = next(hop.host for hop in route.hops if block in hop.blocks)
            found.setdefault(host, route.microbatch)
        return found

    def list_receivers(self, piece: SumPiece) -> frozenset[HostName]:
        """Return the hosts that need a piece."""
        return self.units[piece.unit].list_holders(self.holders)
