"""Programs that treat some of their arrays element by element, found in a jaxpr and applied to raveled arrays.

An elementwise operation does not see shapes: applied to vectors of the elements in any order it gives the vector of its
result. `find_elementwise` tells which arguments of a program meet such operations only; `apply_elementwise` is the
program for those arguments raveled. The traced function itself has seen every array in its own shape.

Arrays that meet in an operation are in one *class*: all are raveled, or none. A class is not elementwise if an array of
it meets any other operation: a reduction, a product of matrices, a reshape, random numbers of its shape.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core

from resilient_jax.sharding.jaxprs import CALLS, bind_equation, walk
from resilient_jax.sharding.raveled_array import RaveledArray, is_raveled

_NAMES: Final = """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz
    complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh xor"""
ELEMENTWISE: Final = frozenset(_NAMES.split())
"""Primitives that compute each element of their result from the elements at the same place, and from scalars."""
BROADCAST: Final = "broadcast_in_dim"
"""Elementwise where it broadcasts a scalar."""


# Which arguments meet elementwise operations only.


class _Class:
    """A set of values that meet in elementwise operations, as a node of a disjoint-set forest."""

    def __init__(self, *, is_elementwise: bool = True) -> None:
        self.is_elementwise = is_elementwise
        self._parent: _Class | None = None

    def find(self) -> "_Class":
        """Return the representative of the set."""
        node = self
        while node._parent is not None:
            node = node._parent
        return node

    def merge(self, other: "_Class") -> None:
        """Make one set of two."""
        one, two = self.find(), other.find()
        if one is not two:
            two._parent = one
            one.is_elementwise &= two.is_elementwise


def find_elementwise(closed: core.ClosedJaxpr, pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Return of each argument of a program whether it may be raveled.

    Args:
        pairs: (argument, result), by index, that are to be both raveled or both not: a state before and after.
    """
    jaxpr = closed.jaxpr
    inputs = [
        _Class(is_elementwise=bool(_shape_of(var)) and not _is_random_key(var.aval)) for var in jaxpr.invars
    ]
    outputs = walk(
        jaxpr,
        inputs,
        _classify_equation,
        # An array in the program itself has its own shape; a scalar suits every class.
        read_constant=lambda aval, _: _Class(is_elementwise=not aval.shape),
        enters=CALLS,
    )
    for argument, result in pairs:
        inputs[argument].merge(outputs[result])
    return [one.find().is_elementwise for one in inputs]


def _classify_equation(equation: core.JaxprEqn, operands: tuple[_Class, ...]) -> Sequence[_Class]:
    if not _is_elementwise(equation):
        for one in operands:
            one.find().is_elementwise = False
        return [_Class(is_elementwise=False) for _ in equation.outvars]
    (result,) = equation.outvars
    joined = _Class()
    for atom, one in zip(equation.invars, operands, strict=True):
        if _shape_of(atom) == _shape_of(result) != ():
            joined.merge(one)
    return [joined]


def _is_elementwise(equation: core.JaxprEqn) -> bool:
    shapes = set(map(_shape_of, equation.invars))
    if equation.primitive.name == BROADCAST:
        return shapes == {()}
    return equation.primitive.name in ELEMENTWISE and shapes <= {(), _shape_of(equation.outvars[0])}


def _is_random_key(aval: Any) -> bool:  # noqa: ANN401 - an abstract array
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _shape_of(atom: Any) -> tuple[int, ...]:  # noqa: ANN401 - a variable or a literal
    return tuple(atom.aval.shape)


# The program on raveled arrays.


@dataclasses.dataclass(frozen=True, slots=True)
class _Uniform:
    """An array of any shape whose elements are all equal: made by broadcasting a scalar, or computed from such."""

    scalar: Any


def apply_elementwise(closed: core.ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a program for arguments of which some are raveled.

    Args:
        arguments: arrays, and `RaveledArray` of those that `find_elementwise` found. All vectors of one shape are
            padded to one length.
    """
    found = walk(closed, arguments, _apply_equation, read_constant=lambda _, content: content, enters=CALLS)
    return [_expand(*pair) for pair in zip(found, closed.jaxpr.outvars, strict=True)]


def _apply_equation(equation: core.JaxprEqn, operands: tuple[Any, ...]) -> Sequence[Any]:
    if equation.primitive.name == BROADCAST and _is_elementwise(equation):
        return [_Uniform(operands[0])]
    atoms = equation.invars
    raveled = [value for value in operands if is_raveled(value)]
    has_uniform = any(isinstance(value, _Uniform) for value in operands)
    if _is_elementwise(equation) and (raveled or (has_uniform and all(map(_is_scalar, operands)))):
        length = raveled[0].vector.shape if raveled else ()
        vectors = [_to_vector(value, atom, length) for value, atom in zip(operands, atoms, strict=True)]
        (result,) = bind_equation(equation, vectors)
        return [RaveledArray(result, raveled[0].shape) if raveled else _Uniform(result)]
    assert not raveled, f"{equation.primitive.name} is not elementwise"
    return bind_equation(equation, [_expand(*pair) for pair in zip(operands, atoms, strict=True)])


def _is_scalar(value: Any) -> bool:  # noqa: ANN401 - an array of any kind
    return isinstance(value, _Uniform) or jnp.shape(value) == ()


def _to_vector(value: Any, atom: Any, length: tuple[int, ...]) -> Any:  # noqa: ANN401 - an array of any kind
    """Return an operand of an elementwise operation on vectors."""
    if is_raveled(value):
        return value.vector
    scalar = value.scalar if isinstance(value, _Uniform) else value
    # The dtype of the program: a literal may be a number of Python's.
    return jnp.broadcast_to(jnp.asarray(scalar, atom.aval.dtype), length)


def _expand(value: Any, atom: Any) -> Any:  # noqa: ANN401 - an array of any kind
    """Return an operand that is not raveled as an array of its own shape; a raveled one as it is."""
    if isinstance(value, _Uniform):
        return jnp.broadcast_to(jnp.asarray(value.scalar, atom.aval.dtype), atom.aval.shape)
    if is_raveled(value) or isinstance(value, jax.Array):
        return value
    return jnp.asarray(value, atom.aval.dtype)


def ravel_like(value: Any, like: Any) -> Any:  # noqa: ANN401 - arrays of any kind
    """Return a result that is to be raveled as an argument is."""
    if not is_raveled(like) or is_raveled(value):
        return value
    # All elements are equal, else the result would be raveled: whatever its shape, one of them is enough.
    return RaveledArray(jnp.broadcast_to(value.reshape(-1)[0], like.vector.shape), like.shape)
