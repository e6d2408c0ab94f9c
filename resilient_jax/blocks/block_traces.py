"""The cut of a flat loss program at its marks: the equations of each block, and what crosses from block to block.

An equation that depends on weights *and* on the batch or the key belongs to the block in whose part of the program it
is. All others are computed in each block that needs them: masks, positions, random bits, targets, since batch and key
are the same pure function of the step on every host; and casts of weights, since a weight may belong to several blocks.
So what crosses a cut depends on weights and on the batch: the hidden state, and whatever else a later block reads.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from resilient_jax.blocks.equation_slices import (
    Value,
    describe_var,
    evaluate_slice,
    list_inputs,
    list_vars,
    propagate_flags,
    select_equations,
)
from resilient_jax.blocks.layer_marks import read_mark
from resilient_jax.blocks.loss_trace import LossTrace
from resilient_jax.blocks.model_weights import Weight
from resilient_jax.errors import CallerError

_WEIGHT, _DATA = 1, 2
_BOTH = _WEIGHT | _DATA


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """The program of a block.

    Attributes:
        closed: program of the weights, the values from the block before, the leaves of the batch and of the key;
            returns the values for the next block (of the last block: the loss), then the results.
        weights: weights that the block takes, in the order of first use.
        num_inputs: number of values from the block before.
        num_outputs: number of values for the next block.
        result_names: names of the results, as `LossTrace.result_names`.
    """

    closed: core.ClosedJaxpr
    weights: tuple[Weight, ...]
    num_inputs: int
    num_outputs: int
    result_names: tuple[str, ...]


def cut_trace(trace: LossTrace, *, keep_unused: bool = True) -> tuple[BlockTrace, ...]:
    """Cut a loss at its marks.

    Args:
        keep_unused: True: the first block has the weights that no output depends on; else no block has them.

    Raises:
        CallerError: the loss depends on no weight.
    """
    return tuple(_Cut(trace, keep_unused=keep_unused).make_blocks())


def _number_blocks(equations: Sequence[core.JaxprEqn]) -> list[int]:
    """Return the block of each equation: one begins with each call of a layer, the last one after the last call."""
    marks = [(place, mark) for place, equation in enumerate(equations) if (mark := read_mark(equation))]
    runs = [(mark, next(run)[0]) for mark, run in itertools.groupby(marks, key=lambda pair: pair[1])]
    starts = {place for mark, place in runs if mark.is_input}
    if not runs[-1][0].is_input:
        starts.add(runs[-1][1])
    return list(itertools.accumulate(int(place in starts) for place in range(len(equations))))


class _Cut:
    """One loss while it is cut."""

    def __init__(self, trace: LossTrace, *, keep_unused: bool) -> None:
        self._trace, jaxpr = trace, trace.closed.jaxpr
        self._keep_unused = keep_unused
        self._jaxpr, count = jaxpr, len(trace.table.weights)
        self._flags = propagate_flags(
            jaxpr, [_WEIGHT if place < count else _DATA for place in range(len(jaxpr.invars))]
        )
        self._weights = dict(zip(jaxpr.invars, trace.table.weights, strict=False))
        self._block_of, self._num_blocks = self._assign_equations()
        self._loss, *self._aux = jaxpr.outvars
        if not self._is_anchored(self._loss):
            raise CallerError(
                "loss: found a loss that does not depend on both the variables and the batch, expected the loss of a "
                "microbatch"
            )

    def make_blocks(self) -> list[BlockTrace]:
        """Return the blocks, in order."""
        crossing = self._find_crossing()
        results = self._place_results()
        return [
            self._make_block(number, crossing[number], crossing[number + 1], results[number])
            for number in range(self._num_blocks)
        ]

    def _is_anchored(self, atom: Any) -> bool:  # noqa: ANN401 - a variable or a literal
        return not isinstance(atom, core.Literal) and self._flags[atom] == _BOTH

    def _assign_equations(self) -> tuple[dict[int, int], int]:
        """Return the blocks of anchored equations, by the id of the equation, and how many blocks there are."""
        numbers = _number_blocks(self._jaxpr.eqns)
        anchored = {
            id(equation): number
            for equation, number in zip(self._jaxpr.eqns, numbers, strict=True)
            if any(self._flags[var] == _BOTH for var in equation.outvars)
        }
        # A part of the program without an equation of its own, such as before a first layer that reads the batch, is
        # no block.
        dense = {number: place for place, number in enumerate(sorted(set(anchored.values())))}
        return {equation: dense[number] for equation, number in anchored.items()}, len(dense)

    def _find_crossing(self) -> list[list[Any]]:
        """Return which variables enter each block, and at last what the last block returns: the loss."""
        made: dict[Any, int] = {}
        last_use: dict[Any, int] = {self._loss: self._num_blocks}
        for equation in self._jaxpr.eqns:
            if (block := self._block_of.get(id(equation))) is None:
                continue
            made |= dict.fromkeys(equation.outvars, block)
            for var in list_vars(equation.invars):
                if var in made:
                    last_use[var] = max(last_use.get(var, 0), block)
        entering: list[list[Any]] = [
            [var for var, block in made.items() if block < number <= last_use.get(var, -1)]
            for number in range(self._num_blocks)
        ]
        return [*entering, [self._loss]]

    def _place_results(self) -> list[list[int]]:
        """Return which auxiliary outputs each block makes."""
        holders = self._find_holders()
        placed: list[list[int]] = [[] for _ in range(self._num_blocks)]
        for number, atom in enumerate(self._aux):
            block = self._num_blocks - 1
            if self._is_anchored(atom):
                block = next(self._block_of[id(each)] for each in self._jaxpr.eqns if atom in each.outvars)
            elif not isinstance(atom, core.Literal) and self._flags[atom] == _WEIGHT:
                # Of weights alone: no block needs others for it, if that can be.
                sources = list_inputs(select_equations(self._jaxpr.eqns, [atom]), [atom])
                block = max(holders.get(var, 0) for var in sources)
            placed[block].append(number)
        return placed

    def _find_holders(self) -> dict[Any, int]:
        """Return the first block that needs a weight."""
        holders: dict[Any, int] = {}
        for number in range(self._num_blocks):
            own = [equation for equation in self._jaxpr.eqns if self._block_of.get(id(equation)) == number]
            read = list_inputs(own, [])
            for var in list_inputs(select_equations(self._list_within(number), read), read):
                if var in self._weights:
                    holders.setdefault(var, number)
        return holders

    def _list_within(self, number: int) -> list[core.JaxprEqn]:
        """Return the equations that a block may evaluate: its own, and those of no block."""
        return [each for each in self._jaxpr.eqns if self._block_of.get(id(each), number) == number]

    def _make_block(
        self, number: int, entering: list[Any], leaving: list[Any], results: list[int]
    ) -> BlockTrace:
        outputs = [*leaving, *(self._aux[result] for result in results)]
        equations = select_equations(self._list_within(number), outputs)
        read = list_inputs(equations, outputs)
        weight_vars = [var for var in read if var in self._weights]
        if number == 0 and self._keep_unused:
            weight_vars += self._list_unused()
        data_vars = self._jaxpr.invars[len(self._trace.table.weights) :]
        closed = _trace_slice(
            equations, [*weight_vars, *entering, *data_vars], outputs, self._read_constants()
        )
        names = self._trace.result_names
        return BlockTrace(
            closed=closed,
            weights=tuple(self._weights[var] for var in weight_vars),
            num_inputs=len(entering),
            num_outputs=len(leaving),
            result_names=tuple(names[1 + result] for result in results),
        )

    def _read_constants(self) -> dict[Any, Value]:
        return dict(zip(self._jaxpr.constvars, self._trace.closed.consts, strict=True))

    def _list_unused(self) -> list[Any]:
        """Return the weights that no output depends on; the first block holds them, with gradients of zero."""
        needed = select_equations(self._jaxpr.eqns, self._jaxpr.outvars)
        used = {*list_inputs(needed, self._jaxpr.outvars)}
        return [var for var in self._weights if var not in used]


def _trace_slice(
    equations: Sequence[core.JaxprEqn],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: dict[Any, Value],
) -> core.ClosedJaxpr:
    """Return a program of these equations."""

    def run(*values: Value) -> list[Value]:
        return evaluate_slice(equations, constants | dict(zip(inputs, values, strict=True)), outputs)

    return jax.make_jaxpr(run)(*map(describe_var, inputs))
