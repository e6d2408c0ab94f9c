"""The function that computes a microbatch on a replica's mesh."""

import functools
from typing import Any

import jax
from jax.extend import core

from resilient_jax.program_analysis.program_digest import ProgramDescription
from resilient_jax.sharding.placements import Placement
from resilient_jax.step.microbatch_accumulator import Microbatch
from resilient_jax.step.microbatch_program import MicrobatchProgram
from resilient_jax.step.random_keys import make_microbatch_id
from resilient_jax.step.replicas import Replica
from resilient_jax.trainer.model_adapters import Variables

Tree = Any
"""A pytree of arrays."""


def make_microbatch_function(
    compute: Any,  # noqa: ANN401 - a jitted function
    variables: Variables,
    placement: Placement,
    example: Tree,
    key_step: int | None = None,
    update: ProgramDescription | None = None,
) -> MicrobatchProgram:
    """Return a function of a microbatch, which copies the variables to a replica's mesh once.

    Args:
        variables: variables on this host's devices.
        example: abstract arrays of a microbatch.
        key_step: step for the random keys; None: the microbatch's step.
    """
    variables_by_mesh: dict[jax.sharding.Mesh, Variables] = {}

    def list_arguments(replica: Replica, batch: Tree, step: int, index: int) -> tuple[Tree, ...]:
        if replica.mesh not in variables_by_mesh:  # two threads have two replicas
            variables_by_mesh[replica.mesh] = replica.to_replica(variables)
        return variables_by_mesh[replica.mesh], batch, make_microbatch_id(step, index)

    def bind(microbatch: Microbatch) -> tuple[Any, ...]:
        replica = microbatch.replica
        step = microbatch.step if key_step is None else key_step
        batch = replica.place_batch(microbatch.batch)
        arguments = list_arguments(replica, batch, step, microbatch.index)
        program = functools.partial(compute, placement=placement.with_mesh(replica.mesh.abstract_mesh))
        return program, *arguments

    def trace(replica: Replica) -> core.ClosedJaxpr:
        arguments = list_arguments(replica, replica.describe_batch(example), 0, 0)
        return compute.trace(*arguments, placement=placement.with_mesh(replica.mesh.abstract_mesh)).jaxpr

    return MicrobatchProgram(bind, trace, update)


def make_abstract(batch: Tree) -> Tree:
    """Return the shapes and dtypes of a batch on devices, which may have narrower dtypes."""
    return jax.eval_shape(lambda tree: tree, batch)
