"""What is summed over microbatches, in pieces that some hosts compute and some need.

A *piece* is the gradients of one block for the weights of one unit, and what the block makes of variables of that unit
that the loss changes; the other results of the block's forward pass (loss, metrics) are in the piece of its own unit.
Hosts that run the block compute it, hosts that hold the unit need it.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.blocks.loss_trace import CHANGED
from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_runner import LOSS
from resilient_jax.pipeline.state_units import StateUnit
from resilient_jax.pipeline_schedule.routes import Routes
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.running_total import list_formats, start_total
from resilient_jax.weighted_mean import join_weights

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumPiece:
    """Gradients of a block for the weights of a unit.

    Attributes:
        number: index of the piece, the same on all hosts.
        block: block whose passes make the addends.
        unit: number of the unit.
        names: names of the trained weights.
        changed_names: names of the variables.
        result_names: names of the other results of the block that are in the piece.
        shapes: shapes of one microbatch's addend: gradients, then variables, then results.
    """

    number: int
    block: int
    unit: int
    names: tuple[str, ...]
    changed_names: tuple[str, ...]
    result_names: tuple[str, ...]
    shapes: Shapes

    def select(self, gradients: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the addend of a microbatch."""
        return (
            *(gradients[name] for name in self.names),
            *(results[f"{CHANGED}/{name}"] for name in self.changed_names),
            *(results[name] for name in self.result_names),
        )

    def describe_total(self, spec: AccumulationSpec) -> Any:  # noqa: ANN401 - a tree of shapes
        """Return the shapes of the integers that a sum is kept as."""
        limits = np.zeros(len(list_formats(spec, self.shapes)), np.int32)
        return jax.eval_shape(functools.partial(start_total, spec, limits=limits), self.shapes)


def list_sum_pieces(cut: CutModel, units: Sequence[StateUnit]) -> tuple[SumPiece, ...]:
    """Return all pieces of a model."""
    outputs = dict(zip(cut.trace.result_names, cut.trace.closed.out_avals, strict=True))
    changed = cut.changed_variables
    found: list[SumPiece] = []
    for number, unit in enumerate(units):
        makers = {changed[weight.name][0] for weight in unit.weights if weight.name in changed}
        for block in sorted({*unit.blocks, *makers}):
            names = unit.trained_names if block in unit.blocks else ()
            changed_names = tuple(
                weight.name
                for weight in unit.weights
                if weight.name in changed and changed[weight.name][0] == block
            )
            results = _list_results(cut, block) if unit.blocks == (block,) else ()
            shapes = [weight.describe() for weight in unit.weights if weight.name in names]
            shapes += [changed[name][1] for name in changed_names]
            shapes += [jax.ShapeDtypeStruct(outputs[name].shape, outputs[name].dtype) for name in results]
            piece = SumPiece(
                number=len(found),
                block=block,
                unit=number,
                names=names,
                changed_names=changed_names,
                result_names=results,
                shapes=tuple(shapes),
            )
            found.append(piece)
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
