"""A lowered program is used again after JAX has dropped it, where it is the same module, and only there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import util
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.jax_runtime import lowering_cache
from resilient_jax.jax_runtime.distributed import keep_traces
from resilient_jax.jax_runtime.lowering_cache import keep_lowerings
from tests.support.eight_devices import eight_devices as eight_devices

X = np.ones((8, 4), np.float32)


@pytest.fixture
def lowered(monkeypatch):
    """The names of the modules that JAX lowers, from the moment that lowerings are kept."""
    names = []
    original = mlir.lower_jaxpr_to_module

    @functools.wraps(original)
    def count(module_name, *arguments, **more):
        names.append(module_name)
        return original(module_name, *arguments, **more)

    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", count)
    assert keep_lowerings() is None
    return names


def lower_again(function, *arguments, **options):
    """Lower a function after JAX has dropped what it drops with a backend."""
    with keep_traces():
        util.clear_all_caches()
    return function.lower(*arguments, **options).as_text()


def test_a_program_is_lowered_once(lowered):
    @jax.jit
    def product(x):
        return x @ x.T

    assert lower_again(product, X) == lower_again(product, X)
    assert len(lowered) == 1


def test_a_module_serves_other_devices(lowered, eight_devices):
    @jax.jit
    def product(x):
        return x @ x.T

    def place(devices):
        return jax.device_put(X, NamedSharding(Mesh(np.array(devices), "d"), P("d")))

    first, second = place(eight_devices[:4]), place(eight_devices[4:])
    assert lower_again(product, first) == lower_again(product, second)
    assert len(lowered) == 1
    compiled = product.lower(second).compile()
    np.testing.assert_array_equal(compiled(second), X @ X.T)


def test_what_changes_a_module_has_it_lowered_anew(lowered, eight_devices):
    def double(x):
        return x @ x.T * 2

    plain = jax.jit(double)
    mesh = Mesh(np.array(eight_devices), "d")
    lower_again(plain, X)
    with jax.default_matmul_precision("highest"):
        lower_again(plain, X)
    lower_again(plain, jax.device_put(X, NamedSharding(mesh, P("d"))))
    lower_again(plain, jax.device_put(X, NamedSharding(mesh, P())))
    lower_again(jax.jit(double, out_shardings=NamedSharding(mesh, P("d"))), X)
    lower_again(jax.jit(lambda x: x + 1, donate_argnums=0), X)
    lower_again(jax.jit(lambda x: x + 1), X)
    assert len(lowered) == 7


def test_a_callback_belongs_to_one_lowering(lowered):
    @jax.jit
    def call_back(x):
        return jax.pure_callback(np.sin, x, x)

    for _ in range(2):
        lower_again(call_back, X)
    assert len(lowered) == 2


def test_a_trace_that_goes_takes_its_modules_along(lowered):
    step = jax.jit(lambda x: jnp.tanh(x) * 3)
    lower_again(step, X)
    cache = mlir.lower_jaxpr_to_module
    assert isinstance(cache, lowering_cache.LoweringCache)
    assert len(cache._modules) == 1
    del step
    jax.clear_caches()
    assert not cache._modules


def test_another_jax_keeps_its_own_way(monkeypatch):
    original = mlir.lower_jaxpr_to_module
    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", lambda module_name, jaxpr, *, more: None)
    reason = keep_lowerings()
    assert reason is not None
    assert "more" in reason
    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", original)
