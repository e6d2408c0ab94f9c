"""Compares compute functions of which nothing is known, by tracing a call: what it computes, and what it has read.

`jax.make_jaxpr` runs the function's Python and none of its programs. What the function reads, or closes over outside of
its jitted functions, becomes constants of the call. They are no part of the program: they are parameters or data. A
function that needs the value of what it has computed cannot be traced, and is not compared.

The jitted functions inside keep their traces, so the call that computes does not trace them again.
"""

import hashlib
import logging
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core

from resilient_jax.program_analysis.program_digest import ProgramDescription, describe_program
from resilient_jax.state.array_digest import add_array
from resilient_jax.state.state_digest import DIGEST_WORDS, make_no_digest

logger = logging.getLogger(__name__)


class MicrobatchCall(Protocol):
    """A compute function with everything else that its microbatches need."""

    def __call__(self, step: int, index: int, /) -> Any:  # noqa: ANN401 - a tree
        """Compute a microbatch of a step."""
        ...


def describe_call(call: MicrobatchCall) -> ProgramDescription | None:
    """Return what microbatch 0 of step 0 is computed by; None: it is not known, or not the same in each call."""
    first, second = (_trace(call, 0, 0) for _ in range(2))
    if first is None or second is None:
        return None
    found = describe_program(first, compares_constants=False)
    return found if describe_program(second, compares_constants=False).digest == found.digest else None


def digest_call(call: MicrobatchCall, step: int, index: int, num_microbatches: int) -> np.ndarray:
    """Return int32[DIGEST_WORDS], the digest of what a microbatch is computed by, and of the arrays that it alone has.

    Arrays on devices that another microbatch has, too, are parameters, which are compared elsewhere. Where the call
    cannot be traced it is `NO_DIGEST`.
    """
    jaxpr, other = _trace(call, step, index), _trace(call, step, (index + 1) % num_microbatches)
    if jaxpr is None or other is None:
        return make_no_digest()
    shared = {id(value) for value in other.consts}
    # Numbers that the function draws are part of the program.
    found = describe_program(jaxpr, compares_constants=False)
    digest = hashlib.blake2b(found.digest, digest_size=4 * DIGEST_WORDS)
    for value in jaxpr.consts:
        if not isinstance(value, jax.Array) or (value.is_fully_addressable and id(value) not in shared):
            add_array(digest, "", value)
    return np.frombuffer(digest.digest(), np.int32)


def _trace(call: MicrobatchCall, step: int, index: int) -> core.ClosedJaxpr | None:
    """Return a call as a program, with the arrays of this generation in it; None: it cannot be traced."""
    try:
        # A new function each time: of a known one JAX has the trace, with the data of then.
        return jax.make_jaxpr(lambda: call(step, index))()
    # The call that computes raises it, too, where the user expects it.
    except Exception:
        logger.debug("a compute function could not be traced for comparison", exc_info=True)
        return None
