"""What a traced program computes, as a digest that is the same in every process that traces the same function.

A jaxpr has much that differs from process to process and changes no result: names, source lines, object addresses,
devices, the order of independent equations, what only prints. So each value gets a digest of what it is computed from:

    digest(argument i) = H(i, shape, dtype)        digest(constant) = H(dtype, shape, its bits)
    digest(result k of an equation) = H(H(primitive, parameters, digests of its operands), k)

and the digest of a program is that of its results: what no result depends on does not count. Calls are inlined.

Nor do shardings and weak types count: they follow from where an argument was made, and a host that has just restored
its state may have others. Of parameters those count that are plain values or jaxprs; of any other object, such as a
function, only its type does. So differences there are missed, and those in constants above `MAX_CONSTANT_BYTES`.
"""

import collections
import dataclasses
import enum
import hashlib
import itertools
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, Sharding
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.jaxprs import CALLS, inner_jaxprs, unwrap_jaxpr, walk

MAX_CONSTANT_BYTES: Final = 2**20
"""Of a constant that is compared by content: a millisecond. Of a larger one its shape and dtype count."""
MAX_SHOWN_SIZE: Final = 4
"""Elements of a constant that is shown, not only digested."""
MAX_SHOWN_CHARACTERS: Final = 24
"""Of a parameter that is shown beside its operation."""
DIGEST_BYTES: Final = 16
PROGRAM: Final = "program"
"""Name of the line with the digest."""
ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+")
SKIPPED_PARAMETERS: Final = frozenset({"name", "debug_info", "weak_type"})
"""Change no result."""
IDENTITIES: Final = frozenset(
    {
        "sharding_constraint",
        "reshard",
        "mesh_cast",
        "layout_constraint",
        "optimization_barrier",
        "name",
        "copy",
        "device_put",
    }
)
"""Primitives whose results are their operands, wherever these are."""
ALIGNED: Final = frozenset({"scan", "cond"})
"""The arguments of the jaxprs inside are the last operands, in order: what they do not use does not count."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramDescription:
    """What a program computes.

    Attributes:
        lines: `name: value`, what the program consists of: for telling two programs apart where their digests differ.
    """

    digest: bytes
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A value of a program.

    Attributes:
        digest: digest of what the value is computed from.
        label: operation, argument or constant of the value.
        kind: "argument", "constant", "operation"; or "result" of an operation with several.
        inputs: values that the value is computed from.
        inner: occurrences of each label in the jaxprs inside of the value's operation.
    """

    digest: bytes
    label: str
    kind: str
    inputs: tuple["_Node", ...] = ()
    inner: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """A jaxpr inside of an operation: its digest, which of its arguments count, how often each label occurs."""

    digest: bytes
    used: frozenset[int]
    counts: Mapping[str, int]


MAX_OUTLINES: Final = 16
"""Programs that are remembered by their outlines: a job accumulates one thing or two, on replicas of one shape."""

_descriptions: "weakref.WeakKeyDictionary[core.ClosedJaxpr, ProgramDescription]" = weakref.WeakKeyDictionary()
"""JAX gives the same jaxpr again as long as it keeps a trace."""
_by_outline: dict[bytes, ProgramDescription] = {}
"""Those of programs without their own constants, the last one described last."""
_numbers: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""A number for each jaxpr of a call, which no other jaxpr of this process has or had."""
_next_number = itertools.count()


def describe_program(closed: core.ClosedJaxpr, *, compares_constants: bool = True) -> ProgramDescription:
    """Return what a program computes. Takes some 10 microseconds for each equation, and nothing the second time.

    A function that is not jitted itself has a new trace each time; but what it calls is traced once. So a program that
    was traced anew takes the time of its own equations alone, if its calls are of the jaxprs of the last time.

    Args:
        compares_constants: True: the content of the program's constants counts; False: only the content of constants of
            the jaxprs inside.
    """
    found = _descriptions.get(closed)
    if found is None:
        if compares_constants:
            found = _describe(closed, None)
        else:
            outline = _OutlineDigester(closed).digest_body(closed).digest
            found = _by_outline.pop(outline, None) or _describe(closed, closed)
            _by_outline[outline] = found
            if len(_by_outline) > MAX_OUTLINES:
                del _by_outline[next(iter(_by_outline))]
        _descriptions[closed] = found
    return found


def _describe(closed: core.ClosedJaxpr, without_constants: core.ClosedJaxpr | None) -> ProgramDescription:
    body = _Digester(without_constants).digest_body(closed)
    arguments = [
        f"argument {index}: {_describe_aval(var.aval)}"
        for index, var in enumerate(closed.jaxpr.invars)
        if index in body.used
    ]
    lines = [f"{label}: {count} times" for label, count in sorted(body.counts.items())]
    return ProgramDescription(body.digest, (*arguments, *lines, f"{PROGRAM}: {body.digest.hex()}"))


class _Digester:
    """Digests one program.

    Args:
        without_constants: jaxpr whose constants' content does not count; None: the content of all constants counts.
    """

    _enters = CALLS

    def __init__(self, without_constants: core.ClosedJaxpr | None) -> None:
        self._without_constants = without_constants
        self._bodies: dict[int, tuple[Any, _Body]] = {}
        """By the id of the jaxpr, with the jaxpr, which keeps its id its own."""

    def digest_body(self, jaxpr: Any) -> _Body:  # noqa: ANN401 - closed or not, by JAX's version
        """Return what a jaxpr computes from any arguments."""
        known = self._bodies.get(id(jaxpr))
        if known is not None:
            return known[1]
        inside = unwrap_jaxpr(jaxpr)
        inputs = [_make_argument(index, var.aval) for index, var in enumerate(inside.invars)]
        outputs = self._walk(jaxpr, inputs)
        nodes = _list_reachable(outputs)
        used = frozenset(index for index, node in enumerate(inputs) if node.digest in nodes)
        body = _Body(_hash(node.digest for node in outputs), used, _count_labels(nodes.values()))
        self._bodies[id(jaxpr)] = jaxpr, body
        return body

    def _walk(self, jaxpr: Any, inputs: Sequence[_Node]) -> list[_Node]:  # noqa: ANN401 - closed or not
        if jaxpr is self._without_constants:
            jaxpr = unwrap_jaxpr(jaxpr)
        return walk(jaxpr, inputs, self._apply, read_constant=_make_constant, enters=self._enters)

    def _apply(self, equation: core.JaxprEqn, operands: tuple[_Node, ...]) -> Sequence[_Node]:
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name in IDENTITIES and len(operands) == len(equation.outvars):
            return operands
        if name == "convert_element_type" and _get_dtype(equation.invars[0]) == _get_dtype(
            equation.outvars[0]
        ):
            return operands
        return self._make_results(equation, operands, inner)

    def _make_results(
        self, equation: core.JaxprEqn, operands: tuple[_Node, ...], inner: Sequence[Any]
    ) -> list[_Node]:
        name, bodies = equation.primitive.name, [self.digest_body(jaxpr) for jaxpr in inner]
        if name in ALIGNED and bodies:
            width = len(unwrap_jaxpr(inner[0]).invars)
            used = frozenset[int]().union(*(body.used for body in bodies))
            first = len(operands) - width
            operands = tuple(
                node for place, node in enumerate(operands) if place < first or place - first in used
            )
        counts = collections.Counter[str]()
        for body in bodies:
            counts.update(body.counts)
        parameters = {
            key: self._describe(value)
            for key, value in sorted(equation.params.items())
            if key not in SKIPPED_PARAMETERS
            and not isinstance(value, None | Sharding | P | Mesh | AbstractMesh)
        }
        shown = ", ".join(
            f"{key}={text}"
            for key, text in parameters.items()
            if len(text) <= MAX_SHOWN_CHARACTERS and text != "()" and ": " not in text
        )
        avals = " ".join(_describe_aval(var.aval) for var in equation.outvars)
        label = f"operation {name}({shown}) {avals}" if shown else f"operation {name} {avals}"
        digest = _hash([name.encode(), repr(parameters).encode(), *(node.digest for node in operands)])
        node = _Node(digest, label, "operation", operands, counts)
        if len(equation.outvars) == 1:
            return [node]
        return [
            _Node(_hash([digest, b"result %d" % place]), label, "result", (node,))
            for place in range(len(equation.outvars))
        ]

    def _describe(self, value: Any) -> str:  # noqa: ANN401 - any parameter of a primitive
        """Return a text that is the same in each process."""
        match value:
            case core.Jaxpr() | core.ClosedJaxpr():
                return f"jaxpr {self.digest_body(value).digest.hex()}"
            case tuple() | list():
                return f"({', '.join(map(self._describe, value))})"
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self._describe, value)))}}}"
            case Mapping():
                pairs = sorted(f"{self._describe(key)}={self._describe(item)}" for key, item in value.items())
                return f"{{{', '.join(pairs)}}}"
        return _describe_plain(value)


class _OutlineDigester(_Digester):
    """Digests a program without what its calls compute: equal outlines in one process, equal programs."""

    _enters = frozenset()

    def _apply(self, equation: core.JaxprEqn, operands: tuple[_Node, ...]) -> Sequence[_Node]:
        inner = inner_jaxprs(equation)
        if equation.primitive.name not in CALLS or not inner:
            return super()._apply(equation, operands)
        numbers = [_numbers.setdefault(jaxpr, next(_next_number)) for jaxpr in inner]
        digest = _hash(
            [repr((equation.primitive.name, numbers)).encode(), *(node.digest for node in operands)]
        )
        return [
            _Node(_hash([digest, b"result %d" % place]), "", "result")
            for place in range(len(equation.outvars))
        ]


def _describe_plain(value: Any) -> str:  # noqa: ANN401 - any object
    match value:
        case enum.Enum():
            return value.name
        case None | bool() | int() | float() | complex() | bytes():
            return repr(value)
        case str():
            return ADDRESS.sub("", repr(value))
        case np.ndarray() | np.generic() | jax.Array():
            return _describe_constant(value)
        case np.dtype():
            return value.name
        case type() if issubclass(value, np.generic):
            return np.dtype(value).name
    return f"a {type(value).__name__}"


def _make_argument(index: int, aval: Any) -> _Node:  # noqa: ANN401 - an abstract value
    label = f"argument {index} {_describe_aval(aval)}"
    return _Node(_hash([label.encode()]), label, "argument")


def _make_constant(aval: Any, value: Any) -> _Node:  # noqa: ANN401 - an abstract and a concrete array
    dtype = getattr(aval, "dtype", None)
    if isinstance(value, bool | int | float | complex) and dtype is not None:
        value = np.asarray(value, dtype)
    label = f"constant {_describe_aval(aval)} {_describe_constant(value)}"
    return _Node(_hash([label.encode()]), label, "constant")


def _describe_constant(value: Any) -> str:  # noqa: ANN401 - an array, or anything else
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return "not compared"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return f"a {type(value).__name__}"
    if value.size * dtype.itemsize > MAX_CONSTANT_BYTES:
        return "not compared"
    array = np.asarray(value)
    if array.dtype.hasobject:
        return "not compared"
    if array.size <= MAX_SHOWN_SIZE:
        return str(array.tolist())
    return f"with digest {hashlib.blake2b(array.tobytes(), digest_size=DIGEST_BYTES // 2).hexdigest()}"


def _describe_aval(aval: Any) -> str:  # noqa: ANN401 - an abstract value
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    return type(aval).__name__ if dtype is None or shape is None else f"{dtype}{list(shape)}"


def _get_dtype(atom: Any) -> Any:  # noqa: ANN401 - a variable or a literal
    return getattr(atom.aval, "dtype", None)


def _list_reachable(outputs: Sequence[_Node]) -> dict[bytes, _Node]:
    """Return what the outputs are computed from, themselves included, by digest: each once, however often computed."""
    found: dict[bytes, _Node] = {}
    left = list(outputs)
    while left:
        node = left.pop()
        if node.digest not in found:
            found[node.digest] = node
            left.extend(node.inputs)
    return found


def _count_labels(nodes: Iterable[_Node]) -> collections.Counter[str]:
    """Return how often each operation occurs, and how many operations use each constant."""
    counts = collections.Counter[str]()
    for node in nodes:
        if node.kind == "operation":
            counts[node.label] += 1
            counts.update(node.inner)
            counts.update(each.label for each in node.inputs if each.kind == "constant")
    return counts


def _hash(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
