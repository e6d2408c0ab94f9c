"""Which variables a loss function changes, read off its jaxpr: a result that is an argument is unchanged.

The identity of tracers does not tell: a variable that only passes through a `jit` or a `scan` comes back as another.
"""

from typing import Any

from jax.extend import core

from resilient_jax.sharding.jaxprs import CALLS, get_body, get_scan_arity, unwrap_jaxpr, walk

Source = int | None
"""The position of the argument that a value is equal to; None: it is computed."""


def find_sources(jaxpr: Any) -> list[Source]:  # noqa: ANN401 - closed or not
    """Return for each output of a jaxpr which of its arguments it is.

    >>> find_sources(jax.make_jaxpr(lambda a, b, c: (jax.jit(lambda x: (x, x + 1))(b), a))(1.0, 2.0, 3.0))
    [1, None, 0]
    """
    inputs = range(len(unwrap_jaxpr(jaxpr).invars))
    return walk(jaxpr, inputs, _apply, read_constant=lambda *_: None, enters=CALLS)


def _apply(equation: core.JaxprEqn, sources: tuple[Source, ...]) -> list[Source]:
    if equation.primitive.name != "scan":
        return [None] * len(equation.outvars)
    consts, carries = get_scan_arity(equation)
    # A carry is unchanged if it is returned in its own place; a stacked result if it is what is scanned over.
    return [
        sources[end]
        if end is not None and (end == consts + place if place < carries else end >= consts + carries)
        else None
        for place, end in enumerate(find_sources(get_body(equation)))
    ]
