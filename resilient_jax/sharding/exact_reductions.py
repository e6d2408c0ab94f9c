"""Programs whose results have the same bits however their arrays are sharded.

A program over a mesh adds up an array's elements on each device and then the devices' sums, so the bits of a norm
depend on the mesh. And where a product is added to something, the compiler may round once instead of twice (a fused
multiply-add); whether it does depends on the loops that it makes, and these on the shapes of shards. Seen on CPU: LLVM
fuses within a basic block, and a product that is the same for a whole row is moved out of the inner loop.

`apply_exactly` is a program with each sum of an array computed by `exact_array_sum`, each product kept from being
fused, and each quotient computed by a reciprocal. All else that an update may do is independent of the mesh already:
other elementwise operations, maxima, moving elements. What is not, such as a product of matrices or a loop over arrays,
is found by `find_inexact`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core

from resilient_jax.sharding.elementwise import BROADCAST, ELEMENTWISE
from resilient_jax.sharding.exact_array_sum import MAX_DIM_SIZE, sum_exactly
from resilient_jax.sharding.jaxprs import (
    CALLS,
    Constant,
    InlinedEquation,
    ValueName,
    bind_equation,
    inline_calls,
    walk,
)

SUM: Final = "reduce_sum"
CONDITIONAL: Final = "cond"
_NAMES: Final = """argmax argmin bitcast_convert_type concatenate dynamic_slice dynamic_update_slice expand_dims
    gather iota optimization_barrier pad random_bits random_fold_in random_seed random_split random_unwrap random_wrap
    reduce_and reduce_max reduce_min reduce_or reduce_xor reshape rev scatter sharding_constraint slice split squeeze
    stack stop_gradient threefry2x32 tile transpose unstack"""
SHARD_DEPENDENT: Final = frozenset({"atan"})
"""Elementwise primitives whose bits depend on the place in a shard: a loop's last elements are computed otherwise."""
ORDER_FREE: Final = (ELEMENTWISE | frozenset(_NAMES.split()) | {BROADCAST}) - SHARD_DEPENDENT
"""Primitives whose results depend on no order of additions: elementwise, maxima, and what moves elements."""
MIN_LARGE: Final = 2.0**100
"""Divisors from here on are scaled down: the reciprocal of one above 2**126 would be subnormal, which counts as 0."""
DOWN: Final = 2.0**-64
"""Scale of a large divisor; that of a float32 is then far from both ends of the range."""
_NAMES_OF_PRODUCTS: Final = """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 integer_pow lgamma log log1p logistic mul pow rem rsqrt sin sinh sqrt square tan tanh"""
QUOTIENT: Final = "div"
PRODUCTS: Final = frozenset(_NAMES_OF_PRODUCTS.split())
"""Primitives whose result may be, once it is compiled, that of a multiplication: it can be fused with an addition."""


@dataclasses.dataclass(frozen=True, slots=True)
class InexactOperation:
    """An operation whose bits may depend on how its arrays are sharded.

    Attributes:
        shape: shape of the operation's first floating-point array.
        arguments: indexes of the program's arguments that the operation is computed from.
    """

    primitive: str
    shape: tuple[int, ...]
    arguments: frozenset[int]


def find_inexact(closed: core.ClosedJaxpr) -> InexactOperation | None:
    """Return the first operation that `apply_exactly` cannot make independent of the mesh; None: there is none."""
    found: list[InexactOperation] = []
    inputs = [frozenset({index}) for index in range(len(closed.jaxpr.invars))]
    _search(closed, inputs, found)
    return found[0] if found else None


def _search(jaxpr: Any, inputs: Sequence[frozenset[int]], found: list[InexactOperation]) -> None:  # noqa: ANN401 - closed or not
    apply = functools.partial(_search_equation, found)
    walk(jaxpr, inputs, apply, read_constant=lambda *_: frozenset(), enters=CALLS)


def _search_equation(
    found: list[InexactOperation], equation: core.JaxprEqn, operands: tuple[frozenset[int], ...]
) -> Sequence[frozenset[int]]:
    together = frozenset[int]().union(*operands)
    if equation.primitive.name == CONDITIONAL:
        for branch in equation.params["branches"]:
            _search(branch, operands[1:], found)
    elif not _is_exact(equation):
        shapes = [tuple(_get_aval(atom).shape) for atom in equation.invars if _is_float(atom)]
        found.append(InexactOperation(equation.primitive.name, max(shapes, key=len, default=()), together))
    return [together] * len(equation.outvars)


def _is_exact(equation: core.JaxprEqn) -> bool:
    """Return whether the equation, or what `apply_exactly` makes of it, has the same bits over any mesh."""
    name = equation.primitive.name
    if name == SUM:
        (atom,) = equation.invars
        sizes = [_get_aval(atom).shape[dim] for dim in equation.params["axes"]]
        return not _is_complex(atom) and (not _is_float(atom) or max(sizes, default=1) <= MAX_DIM_SIZE)
    if any(map(_is_complex, (*equation.invars, *equation.outvars))):
        return False
    if name in ORDER_FREE:
        return True
    if not any(map(_is_float, (*equation.invars, *equation.outvars))):
        return True  # integers: exact in any order
    # Whatever is computed of single numbers is computed by every device alike.
    return all(math.prod(_get_aval(atom).shape) <= 1 for atom in (*equation.invars, *equation.outvars))


def apply_exactly(closed: core.ClosedJaxpr, arguments: Sequence[Any], zero: jax.Array) -> list[Any]:
    """Return the results of a program, with the same bits however arrays are sharded.

    Args:
        closed: program in which `find_inexact` finds nothing.
        arguments: arrays, one for each argument of the program.
        zero: int32[] that is 0, and that the compiler cannot know to be 0.
    """
    found = _evaluate(zero, closed, *arguments)
    return [
        # A literal may be a number of Python's.
        value if isinstance(value, jax.Array) else jnp.asarray(value, atom.aval.dtype)
        for value, atom in zip(found, closed.jaxpr.outvars, strict=True)
    ]


def make_exact(
    closed: core.ClosedJaxpr, find_zero: Callable[[Sequence[jax.Array]], jax.Array]
) -> core.ClosedJaxpr:
    """Return the program that `apply_exactly` applies.

    Args:
        closed: program in which `find_inexact` finds nothing.
        find_zero: returns `zero` from the program's arguments.
    """
    return jax.make_jaxpr(lambda *arguments: apply_exactly(closed, arguments, find_zero(arguments)))(
        *closed.in_avals
    )


def _evaluate(zero: jax.Array, jaxpr: core.ClosedJaxpr, *arguments: Any) -> list[Any]:  # noqa: ANN401 - arrays
    """Return the results of a program; sums that do not wait for each other are made together."""
    program = inline_calls(jaxpr)
    values = dict(zip(program.inputs, arguments, strict=True))

    def read(operand: ValueName | Constant) -> Any:  # noqa: ANN401 - an array
        return operand.content if isinstance(operand, Constant) else values[operand]

    waiting = program.equations
    while waiting:
        later, sums = list[InlinedEquation](), list[InlinedEquation]()
        for one in waiting:
            if not all(isinstance(operand, Constant) or operand in values for operand in one.operands):
                later.append(one)
            elif one.equation.primitive.name == SUM and _is_float(one.equation.invars[0]):
                sums.append(one)
            else:
                results = _apply_equation(zero, one.equation, tuple(map(read, one.operands)))
                values.update(zip(one.results, results, strict=True))
        totals = sum_exactly([(read(one.operands[0]), one.equation.params["axes"]) for one in sums])
        for one, total in zip(sums, totals, strict=True):
            values[one.results[0]] = total.astype(_get_aval(one.equation.outvars[0]).dtype)
        waiting = later
    return list(map(read, program.outputs))


def _apply_equation(zero: jax.Array, equation: core.JaxprEqn, operands: tuple[Any, ...]) -> Sequence[Any]:
    name = equation.primitive.name
    if name == CONDITIONAL:
        branches = [functools.partial(_evaluate, zero, branch) for branch in equation.params["branches"]]
        return jax.lax.switch(operands[0], branches, *operands[1:])
    if name == QUOTIENT and _is_float(equation.outvars[0]):
        return [_divide(operands[0], operands[1], zero).astype(_get_aval(equation.outvars[0]).dtype)]
    results = bind_equation(equation, operands)
    if name in PRODUCTS and _is_float(equation.outvars[0]):
        return [_round(results[0], zero)]
    return results


def _divide(dividend: jax.Array, divisor: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the dividend times the rounded reciprocal of the divisor, within an ulp and a half of the quotient.

    XLA divides by what is the same for several elements in this way, and by other numbers not: it depends on shards.
    """
    dividend, divisor = jnp.asarray(dividend), jnp.asarray(divisor)
    dtype = jnp.promote_types(dividend.dtype, jnp.float32)
    dividend, divisor = dividend.astype(dtype), divisor.astype(dtype)
    scale = jnp.where(jnp.abs(divisor) < MIN_LARGE, dtype.type(1), dtype.type(DOWN))
    return _round(dividend * scale * _round(1 / (divisor * scale), zero), zero)


def _round(product: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the product, rounded: to what is combined with an unknown integer no addition can be fused.

    With "or", which is the same twice as once: two of "exclusive or" cancel, whatever the integer is.
    """
    integer = jnp.dtype(f"int{8 * product.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(product, integer) | zero.astype(integer)
    return jax.lax.bitcast_convert_type(bits, product.dtype)


def _is_float(atom: Any) -> bool:  # noqa: ANN401 - a variable or a literal
    return jnp.issubdtype(_get_aval(atom).dtype, jnp.inexact)


def _is_complex(atom: Any) -> bool:  # noqa: ANN401 - a variable or a literal
    return jnp.issubdtype(_get_aval(atom).dtype, jnp.complexfloating)


def _get_aval(atom: Any) -> Any:  # noqa: ANN401 - a variable or a literal
    return atom.aval
