"""The function that computes a microbatch on a replica's mesh."""

from typing import Any

import jax

from resilient_jax.program_analysis.program_digest import ProgramDescription
from resilient_jax.sharding.placements import Placement
from resilient_jax.step.microbatch_program import MicrobatchProgram
from resilient_jax.step.random_keys import make_microbatch_id
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
    return MicrobatchProgram(
        program=compute,
        shared=(variables,),
        make_ids=lambda step, index: (make_microbatch_id(step if key_step is None else key_step, index),),
        describe_example=lambda: example,
        choose_options=lambda mesh: {"placement": placement.with_mesh(mesh)},
        update=update,
    )


def make_abstract(batch: Tree) -> Tree:
    """Return the shapes and dtypes of a batch on devices, which may have narrower dtypes."""
    return jax.eval_shape(lambda tree: tree, batch)
