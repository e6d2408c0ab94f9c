"""Leaves of all kinds that a state may have, and the comparison of two leaves in everything a script can see."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def make_state():
    """Return a leaf of each kind, by a name that says what it is."""
    numbers = np.arange(16).reshape(8, 2)
    return {
        **{f"jax {name}": jnp.asarray(numbers % 4, name) for name in JAX_DTYPES},
        "jax scalar": jnp.float32(2.5),
        "jax without elements": jnp.zeros((0, 3)),
        "weak int": jnp.asarray(3),
        "weak float": jnp.asarray(0.1),
        "weak complex": jnp.asarray(1j),
        "weak matrix": jnp.full((8, 2), 1.5),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(5), 8),
        "rbg key": jax.random.key(9, impl="rbg"),
        "raw key": jax.random.PRNGKey(3),
        **{f"numpy {np.dtype(dtype).name}": (numbers % 4).astype(dtype) for dtype in NUMPY_DTYPES},
        "numpy 0-d": np.array(0.1),
        "numpy without elements": np.zeros((0, 3)),
        "numpy in Fortran's order": np.asfortranarray(numbers.astype(np.float32)),
        "numpy scalar": np.float64(0.1),
        "numpy int scalar": np.int64(2**40 + 1),
        "numpy bool scalar": np.bool_(True),
        "numpy bfloat16 scalar": ml_dtypes.bfloat16(1.5),
        "bool": True,
        "int": 7,
        "large int": -(2**62) - 1,
        "float": 0.1,
        "large float": 1e300,
        "complex": 0.1 + 2j,
        "string": "adam",
    }


JAX_DTYPES = (
    "bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "bfloat16",
    "float16", "float32", "complex64",
)  # fmt: skip
NUMPY_DTYPES = (
    np.bool_, ml_dtypes.int4, np.int8, np.uint16, np.int32, np.int64, np.uint64, ml_dtypes.float8_e4m3fn,
    ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.complex64, np.complex128,
)  # fmt: skip


def describe(leaf):
    """Return what a script can see of a leaf: type, dtype, weak type, shape and bits."""
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        return type(leaf), array.dtype, array.shape, array.tobytes()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(leaf), *describe(jax.random.key_data(leaf))
    return "jax", leaf.dtype, leaf.weak_type, leaf.shape, np.asarray(leaf).tobytes()


def assert_same_kinds(found, expected):
    """Assert that two states are equal, leaf by leaf, in everything that `describe` says."""
    assert found.keys() == expected.keys()
    differing = {
        name: (describe(found[name]), describe(leaf))
        for name, leaf in expected.items()
        if describe(found[name]) != describe(leaf)
    }
    assert differing == {}
