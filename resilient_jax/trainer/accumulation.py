"""The function that computes a microbatch on a replica's mesh."""

from collections.abc import Callable
from typing import Any

import jax

from resilient_jax.sharding.placements import Placement
from resilient_jax.step.microbatch_accumulator import Microbatch
from resilient_jax.step.random_keys import make_microbatch_id
from resilient_jax.trainer.model_adapters import Variables

Tree = Any
"""A pytree of arrays."""


def make_microbatch_function(
    compute: Callable[..., Tree], variables: Variables, placement: Placement, key_step: int | None = None
) -> Callable[[Microbatch], Tree]:
    """Return a function of a microbatch. It copies the variables to a replica's mesh once.

    Args:
        compute: the compiled program.
        variables: on this host's devices.
        placement: of variables and results.
        key_step: for the random keys, in place of the microbatch's step.
    """
    variables_by_mesh: dict[jax.sharding.Mesh, Variables] = {}

    def compute_on_replica(microbatch: Microbatch) -> Tree:
        replica = microbatch.replica
        if replica.mesh not in variables_by_mesh:  # two threads have two replicas
            variables_by_mesh[replica.mesh] = replica.to_replica(variables)
        step = microbatch.step if key_step is None else key_step
        return compute(
            variables_by_mesh[replica.mesh],
            replica.place_batch(microbatch.batch),
            make_microbatch_id(step, microbatch.index),
            placement=placement.with_mesh(replica.mesh.abstract_mesh),
        )

    return compute_on_replica


def make_abstract(batch: Tree) -> Tree:
    """Return the shapes and dtypes of a batch on devices, which may have narrower dtypes."""
    return jax.eval_shape(lambda tree: tree, batch)
