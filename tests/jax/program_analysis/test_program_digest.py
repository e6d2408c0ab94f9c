"""The digest of a program depends on what it computes, and on nothing that differs between processes."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.program_analysis import program_digest
from resilient_jax.program_analysis.program_digest import MAX_CONSTANT_BYTES, describe_program
from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.patience import patience

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)
TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def describe(function, *arguments):
    return describe_program(jax.jit(function).trace(*(arguments or (X,))).jaxpr)


def digest(function, *arguments):
    return describe(function, *arguments).digest


def scaled(x, factor=0.1, power=2):
    return jnp.sum(x**power) * factor


@jax.custom_jvp
def softened(x):
    return jnp.log1p(jnp.exp(x))


softened.defjvp(lambda primals, tangents: (softened(*primals), jax.nn.sigmoid(*primals) * tangents[0]))


def looped(x, factor=0.1):
    def body(carry, row):
        jax.debug.print("{}", row[0])
        return carry * factor + jnp.sum(row), carry

    total, _ = jax.lax.scan(body, 0.0, x)
    return jax.lax.cond(total > 0, jnp.sin, jnp.cos, total)


def dropped(x, seed):
    key = jax.random.key(seed)
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled, functools.partial(scaled, factor=0.2)),
        (scaled, functools.partial(scaled, power=3)),
        (looped, functools.partial(looped, factor=0.2)),
        (jax.grad(looped), jax.grad(functools.partial(looped, factor=0.2))),
        (lambda x: x + TABLE, lambda x: x + TABLE * 2),
        (lambda x: x + jnp.asarray(TABLE), lambda x: x + jnp.asarray(TABLE * 2)),
        (lambda x: jnp.sin(x) - jnp.cos(x), lambda x: jnp.cos(x) - jnp.sin(x)),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.max(x, 0)),
        (lambda x: softened(x) * 1.0, lambda x: softened(x) * 2.0),
        (lambda x: x[0], lambda x: x[1]),
        (lambda x: jax.jit(scaled)(x), lambda x: jax.jit(functools.partial(scaled, factor=0.2))(x)),
        (lambda x: jax.random.uniform(jax.random.key(0)), lambda x: jax.random.uniform(jax.random.key(1))),
    ],
)
def test_another_constant_or_another_operation_changes_the_digest(one, other):
    assert digest(one) != digest(other)


def test_what_no_result_depends_on_does_not_count():
    def shown(x, host):
        jax.debug.print("host {}: {}", jnp.int32(host), x[0, 0])
        jax.jit(lambda host: jax.debug.print("{}", host + host))(jnp.int32(host))
        _ = x * host
        return scaled(x)

    assert (
        digest(functools.partial(shown, host=1)) == digest(functools.partial(shown, host=2)) == digest(scaled)
    )


def test_independent_operations_count_in_no_order_and_names_do_not():
    def in_order(x, names):
        found = {name: {"sin": jnp.sin, "cos": jnp.cos}[name](x) for name in names}
        return found["sin"] * found["cos"]

    assert digest(lambda x: in_order(x, ["sin", "cos"])) == digest(lambda x: in_order(x, ["cos", "sin"]))
    assert digest(jax.jit(scaled)) == digest(jax.checkpoint(scaled)) == digest(scaled)


def test_where_an_argument_is_and_whether_its_type_is_weak_do_not_count(eight_devices):
    def constrained(w, mesh, spec):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, spec))
        return jax.grad(lambda w: jnp.sum(jnp.tanh(w) * 0.5))(w)

    found = set()
    for count in (1, 2, 8):
        mesh = Mesh(np.array(eight_devices[:count]), ("data",))
        for spec in (P(), P("data")):
            value = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, spec))
            found.add(digest(lambda w, mesh=mesh, spec=spec: constrained(w, mesh, spec), value))
    found.add(digest(jax.grad(lambda w: jnp.sum(jnp.tanh(w) * 0.5)), np.ones((8, 3), np.float32)))
    assert len(found) == 1
    weak, strong = jnp.full((), 3.0), jnp.float32(3.0)
    assert digest(jax.grad(lambda a: a * 2.0 + a), jnp.asarray(3.0)) == digest(
        jax.grad(lambda a: a * 2.0 + a), weak * 1.0
    )
    assert digest(lambda a: a * 2.0, weak) == digest(lambda a: a * 2.0, strong)


def test_large_constants_count_by_their_shape_only():
    large = np.zeros(MAX_CONSTANT_BYTES // 4 + 1, np.float32)
    assert digest(lambda x: x[0, 0] + large) == digest(lambda x: x[0, 0] + (large + 1))
    assert digest(lambda x: x[0, 0] + large) != digest(lambda x: x[0, 0] + large[:-1])


def test_the_lines_say_what_differs():
    one, other = (set(describe(functools.partial(scaled, factor=f)).lines) for f in (0.25, 0.5))
    assert {line for line in one ^ other if not line.startswith("program: ")} == {
        "constant float32[] 0.25: 1 times",
        "constant float32[] 0.5: 1 times",
    }


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        hidden = {"a": self.norm(self.up(x)), "b": softened(self.up(x))}
        # The order of a set of strings is another one in each process.
        doubled = {name: hidden[name] * 2.0 for name in set(hidden)}
        return self.drop(doubled["a"] + doubled["b"], rngs=rngs)


def describe_model():
    graph, params = nnx.split(Model(nnx.Rngs(0)))

    def loss(params, x, key):
        found = nnx.merge(graph, params)(x, nnx.Rngs(dropout=key))
        return jnp.mean(found) + looped(x) + dropped(x, 7)

    return describe(jax.value_and_grad(loss), params, np.ones((4, 3), np.float32), jax.random.key(0))


def test_the_digest_is_the_same_in_each_process():
    def run_with(seed):
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        flags = f"--xla_force_host_platform_device_count={seed}"
        return subprocess.run(
            [
                sys.executable,
                "-c",
                f"import {Path(__file__).stem} as test; print(test.describe_model().digest.hex())",
            ],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=patience(12),
        ).stdout

    assert {run_with("1"), run_with("4")} == {f"{describe_model().digest.hex()}\n"}


inner = jax.jit(lambda x: jnp.sum(jnp.tanh(x)))
other_inner = jax.jit(lambda x: jnp.sum(jnp.sin(x)))


def trace_anew(call):
    """Return the trace of a function that JAX has not seen, as of one that is made in each step."""
    return jax.make_jaxpr(lambda: call())()


def test_a_program_that_is_traced_anew_costs_no_digest_of_what_its_calls_compute(monkeypatch):
    def describe_anew(factor):
        rows = jnp.full((4, 3), factor)
        return describe_program(trace_anew(lambda: inner(rows) * 2), compares_constants=False)

    first = describe_anew(1.0)
    entered = []
    walk = program_digest.walk
    monkeypatch.setattr(
        program_digest,
        "walk",
        lambda jaxpr, *rest, **more: entered.append(jaxpr) or walk(jaxpr, *rest, **more),
    )
    assert describe_anew(3.0) == first
    assert len(entered) == 1, "the outline alone"


@pytest.mark.parametrize(
    "other",
    [
        lambda x: other_inner(x) * 2,
        lambda x: inner(x) * 3,
        lambda x: inner(x) + inner(x * 2),
        lambda x: inner(x.T) * 2,
        lambda x: jax.lax.cond(x[0, 0] > 0, inner, other_inner, x) * 2,
    ],
    ids=["another call", "another number", "one call more", "another shape", "inside of a condition"],
)
def test_programs_with_calls_that_are_traced_anew_are_told_apart(other):
    rows = jnp.ones((4, 3))
    one = describe_program(trace_anew(lambda: inner(rows) * 2), compares_constants=False)
    assert describe_program(trace_anew(lambda: other(rows)), compares_constants=False).digest != one.digest
