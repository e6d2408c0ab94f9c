"""A compute function of which hosts can compare what it computes, before it has computed anything."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend import core

from resilient_jax.program_analysis.program_digest import ProgramDescription, describe_program
from resilient_jax.step.microbatch_accumulator import ComputeFunction, Microbatch
from resilient_jax.step.replicas import Replica

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class MicrobatchProgram:
    """A compute function that calls one traced program.

    Attributes:
        compute: the function.
        trace: returns the program's jaxpr for a replica, traced as the call will trace it.
    """

    compute: ComputeFunction[Any]
    trace: Callable[[Replica], core.ClosedJaxpr]

    def __call__(self, microbatch: Microbatch) -> Any:  # noqa: ANN401 - a tree
        """Compute a microbatch."""
        return self.compute(microbatch)


def describe_microbatch(
    compute_fn: ComputeFunction[Any], replicas: Iterable[Replica]
) -> ProgramDescription | None:
    """Return what a compute function computes; None: it is no `MicrobatchProgram`, or this host has no replica."""
    replica = next(iter(replicas), None)
    if not isinstance(compute_fn, MicrobatchProgram) or replica is None:
        return None
    try:
        return describe_program(compute_fn.trace(replica))
    # The call traces it, too, and raises the error where it always came from.
    except Exception:
        logger.debug("a microbatch's program could not be traced for comparison", exc_info=True)
        return None
