"""How the names of dims propagate through a program: one rule for each primitive, for all analyses.

A name says what a dim is for: of a parameter its logical names, of a batch `BATCH`. Each result of an operation has the
names of its operands where their dims are. Of two operands with the same name the first gives it to the result: a mesh
axis shards one dim of an array.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from jax.extend import core

from resilient_jax.sharding.jaxprs import CALLS, get_body, get_scan_arity, walk
from resilient_jax.sharding.logical_axes import LogicalNames

BATCH: Final = "batch"
"""Name of the dim of examples. It stays only on a dim that has all of them and nothing else."""


def make_unnamed(aval: Any) -> LogicalNames:  # noqa: ANN401 - an abstract array
    """Return the names of an array of which nothing is known."""
    return (None,) * len(aval.shape)


def propagate_names(jaxpr: Any, names: Sequence[LogicalNames]) -> list[LogicalNames]:  # noqa: ANN401 - closed or not
    """Return the names of each output of a jaxpr from those of its arguments."""
    return walk(
        jaxpr,
        names,
        propagate_through_equation,
        read_constant=lambda aval, _: make_unnamed(aval),
        enters=CALLS,
    )


def propagate_through_equation(
    equation: core.JaxprEqn, names: Sequence[LogicalNames]
) -> Sequence[LogicalNames]:
    """Return the names of an equation's results from those of its operands."""
    if not any(map(any, names)):
        return [make_unnamed(var.aval) for var in equation.outvars]
    name = equation.primitive.name
    if name.startswith("reduce_"):
        return _propagate_reduction(equation, names)
    if name.startswith("scatter"):
        return names[:1]
    return _RULES.get(name, _propagate_elementwise)(equation, names)


def propagate_into_body(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    """Return the names of the arguments of a call's or a scan's body from those of the equation's operands.

    What a scan runs over loses its first dim in the body. A carry that starts without a name, such as zeros, takes the
    names that it has at the end of the body.
    """
    if equation.primitive.name != "scan":
        return list(names)
    consts, carries = get_scan_arity(equation)
    first_scanned = consts + carries
    scanned = [each[1:] for each in names[first_scanned:]]
    starts = names[consts:first_scanned]
    ends = propagate_names(get_body(equation), [*names[:first_scanned], *scanned])
    carried = [start if any(start) else end for start, end in zip(starts, ends[:carries], strict=True)]
    return [*names[:consts], *carried, *scanned]


def _propagate_scan(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    ends = propagate_names(get_body(equation), propagate_into_body(equation, names))
    carries = get_scan_arity(equation).carries
    # Carries keep their dims; stacked results have the iterations as a new first dim.
    return [*ends[:carries], *((None, *end) for end in ends[carries:])]


def _propagate_call(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    return propagate_names(get_body(equation), names)


def _propagate_product(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    """Return the names of a matrix product, those of the left operand first."""
    # The result has the batched dims first, then the free dims of the left operand, then those of the right.
    contracted, batched = equation.params["dimension_numbers"]
    found: list[str | None] = [None] * len(_get_shape(equation.outvars[0]))
    end = len(batched[0])
    for side in (0, 1):
        free = [d for d in range(len(names[side])) if d not in contracted[side] and d not in batched[side]]
        places = (*enumerate(batched[side]), *enumerate(free, end))
        _add_names(found, {place: names[side][dim] for place, dim in places})
        end += len(free)
    return [tuple(found)]


def _propagate_transpose(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    return [tuple(names[0][dim] for dim in equation.params["permutation"])]


def _propagate_broadcast(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    placed = dict(zip(equation.params["broadcast_dimensions"], names[0], strict=True))
    return [tuple(map(placed.get, range(len(_get_shape(equation.outvars[0])))))]


def _propagate_reduction(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    axes = equation.params.get("axes", ())
    return [_remove_dims(each, axes) for each in names[: len(equation.outvars)]]


def _propagate_squeeze(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    return [_remove_dims(names[0], equation.params["dimensions"])]


def _propagate_reshape(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    """Return the names of dims with as many elements to their left: of a merged dim the first, of split dims on it."""
    before, after = _get_shape(equation.invars[0]), _get_shape(equation.outvars[0])
    found: list[str | None] = [None] * len(after)
    for dim, name in enumerate(names[0]):
        left = math.prod(before[:dim])
        places = [place for place in range(len(after)) if math.prod(after[:place]) == left]
        whole = [place for place in places if after[place] == before[dim]]
        # Of dims of one element and another at the same place, the name is that of the other.
        for place in whole[:1] or (places[-1:] if name != BATCH else ()):
            found[place] = name or found[place]
    return [tuple(found)]


def _propagate_gather(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    """Return the names of the indices, whose dims but the last are those of the result that are no offsets."""
    offsets = equation.params["dimension_numbers"].offset_dims
    others = iter(names[1][:-1])
    rank = len(_get_shape(equation.outvars[0]))
    return [tuple(None if dim in offsets else next(others) for dim in range(rank))]


def _propagate_elementwise(equation: core.JaxprEqn, names: Sequence[LogicalNames]) -> list[LogicalNames]:
    """Return the names by any other primitive: elementwise, or on other dims (slices, sorts, concatenations)."""

    def find_names(result: tuple[int, ...]) -> LogicalNames:
        found: list[str | None] = [None] * len(result)
        for atom, each in zip(equation.invars, names, strict=True):
            shape = _get_shape(atom)
            if len(shape) == len(result):
                _add_names(found, {dim: each[dim] for dim in range(len(shape)) if shape[dim] == result[dim]})
        return tuple(found)

    return [find_names(_get_shape(var)) for var in equation.outvars]


def _add_names(found: list[str | None], names: Mapping[int, str | None]) -> None:
    """Add the names of one more operand, by dim of the result; those of the operands before it stay."""
    taken = frozenset(found)
    for dim, name in names.items():
        if found[dim] is None and name not in taken:
            found[dim] = name


def _remove_dims(names: LogicalNames, removed: Collection[int]) -> LogicalNames:
    return tuple(name for dim, name in enumerate(names) if dim not in removed)


def _get_shape(atom: Any) -> tuple[int, ...]:  # noqa: ANN401 - a variable or a literal
    return atom.aval.shape


_RULES: Final[dict[str, Callable[[core.JaxprEqn, Sequence[LogicalNames]], list[LogicalNames]]]] = {
    **dict.fromkeys(CALLS, _propagate_call),
    "scan": _propagate_scan,
    "dot_general": _propagate_product,
    "transpose": _propagate_transpose,
    "broadcast_in_dim": _propagate_broadcast,
    "argmax": _propagate_reduction,
    "argmin": _propagate_reduction,
    "squeeze": _propagate_squeeze,
    "reshape": _propagate_reshape,
    "gather": _propagate_gather,
}
"""How primitives move names; `_propagate_elementwise` is for all others."""
