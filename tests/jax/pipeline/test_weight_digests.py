"""A weight has a digest whatever its dtype, and no other one has the same."""

import jax.numpy as jnp
import numpy as np

from resilient_jax.state.array_digest import digest_tree


def test_every_bit_dtype_and_shape_counts():
    weights = [
        jnp.arange(6, dtype=dtype).reshape(shape)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32)
        for shape in ((6,), (2, 3))
    ]
    weights += [jnp.zeros((), jnp.bfloat16), jnp.ones((), jnp.bfloat16), jnp.zeros((0, 2), jnp.bfloat16)]
    found = [digest_tree(weight) for weight in weights]
    assert len(set(found)) == len(weights)
    assert found == [digest_tree(np.asarray(weight)) for weight in weights]
    turned = np.arange(6, dtype=np.float32).reshape(3, 2).T
    assert digest_tree(turned) == digest_tree(turned.copy(order="C"))
