"""The walk over jaxprs: every equation once, in order, with the values of its operands."""

import jax
import jax.extend.core
import jax.numpy as jnp

from resilient_jax.sharding.jaxprs import (
    Constant,
    bind_equation,
    get_scan_arity,
    inline_calls,
    iterate_equations,
    walk,
)

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def test_a_walk_carries_values_from_inputs_to_outputs():
    jaxpr = jax.make_jaxpr(lambda x, y: (x * y + 1.0, y))(X, X).jaxpr
    inputs: list[int] = [0, 5]
    depths = walk(
        jaxpr,
        inputs,
        lambda equation, operands: [max(operands) + 1] * len(equation.outvars),
        read_constant=lambda *_: 0,
    )
    assert depths == [7, 5]


def test_equations_inside_calls_and_loops_are_listed_once():
    def program(x):
        return jax.lax.scan(lambda c, _: (jax.jit(jnp.sin)(c), None), x, None, length=4)[0]

    names = [equation.primitive.name for equation in iterate_equations(jax.make_jaxpr(program)(X))]
    assert names.count("sin") == 1
    outer = iterate_equations(jax.make_jaxpr(program)(X), skip_inside=frozenset({"scan"}))
    assert "sin" not in [equation.primitive.name for equation in outer]


def test_the_arity_of_a_scan_is_its_constants_and_carries():
    def program(x, y, zs):
        return jax.lax.scan(lambda c, z: (c * y + z, c), x, zs)

    jaxpr = jax.make_jaxpr(program)(X, X, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    (scan,) = (e for e in iterate_equations(jaxpr) if e.primitive.name == "scan")
    assert get_scan_arity(scan) == (1, 1)


def test_a_program_is_the_same_with_its_calls_inlined():
    table = jnp.arange(3.0)
    square = jax.jit(lambda x: x * table)  # one jaxpr, called twice, with a constant
    nested = jax.jit(lambda x, y: (square(x), square(square(y)), 2.0, y))
    closed = jax.make_jaxpr(lambda x, y: (*nested(y, x), x))(X, X)
    program = inline_calls(closed)
    arguments = (jnp.array([1.0, 2, 3]), jnp.array([4.0, 5, 6]))
    values = dict(zip(program.inputs, arguments, strict=True))

    def read(operand):
        return operand.content if isinstance(operand, Constant) else values[operand]

    for one in program.equations:
        assert one.equation.primitive.name == "mul"
        results = bind_equation(one.equation, list(map(read, one.operands)))
        values.update(zip(one.results, results, strict=True))
    for found, expected in zip(
        map(read, program.outputs),
        jax.jit(lambda *xs: jax.extend.core.jaxpr_as_fun(closed)(*xs))(*arguments),
        strict=True,
    ):
        assert jnp.array_equal(found, expected)
