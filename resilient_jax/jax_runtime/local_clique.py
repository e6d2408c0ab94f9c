"""Keeps the clique of this process's own devices alive through an abort.

On CPU even devices of one process communicate through gloo, over TCP connections of the process with itself. An
abort must break the cliques that span processes, self-connections included (a rank that waits for its
neighbor in the same process would wait forever), but not the clique of the local devices alone: JAX
caches it, and local programs, which have lost nothing, would fail after a shrink. A connection does not show
its clique. So the local clique is formed first, while no other exists, and its connections are recorded.

Cliques of a *part* of the local devices are formed later and do not survive an abort; the next use fails,
and the world is re-formed.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.jax_runtime.gloo import GlooSockets, find_self_connections


def form_local_clique(gloo: GlooSockets) -> GlooSockets:
    """Form the clique of the local devices; return `gloo` with its connections as those that an abort spares.

    Call it right after `connect`, before any other collective. Costs one tiny program.
    """
    devices = jax.local_devices()
    if len(devices) == 1 or not gloo.own_listeners:
        return gloo
    mesh = Mesh(np.array(devices), ("local",))
    ones = np.ones((len(devices),), np.float32)
    sharded = NamedSharding(mesh, P("local"))
    values = jax.make_array_from_callback(ones.shape, sharded, lambda index: ones[index])
    before = find_self_connections(gloo)
    total = jax.jit(_total, out_shardings=NamedSharding(mesh, P()))(values)
    total.block_until_ready()
    return dataclasses.replace(gloo, local_clique=find_self_connections(gloo) - before)


def _total(values: jax.Array) -> jax.Array:
    return values.sum()
