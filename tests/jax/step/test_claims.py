"""What hosts tell each other before an accumulation: totals that can be added."""

import numpy as np

from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.claims import Claims
from resilient_jax.step.contributions import Contributions
from resilient_jax.step.slow_host_watch import make_empty_row

SPEC = AccumulationSpec(name="", step=0, num_microbatches=4, reduction="exact")


def claim(limits, microbatches):
    own = Contributions(SPEC, limits=None if limits is None else np.array(limits, np.int32))
    return Claims(
        microbatches=np.array(microbatches, np.int32),
        limits_digest=np.array(own.limits_digest, np.uint32),
        seconds=np.zeros((), np.float32),
        watched=make_empty_row(),
    )


def exchange(*claims):
    """Return the claims of all hosts, as each of them would have them."""
    rows = []
    for index, own in enumerate(claims):
        own.exchange(index, len(claims), lambda row: rows.append(np.array(row)) or row)
    (found, *others) = [
        own.exchange(index, len(claims), lambda row: np.sum(rows, axis=0, dtype=np.int32))
        for index, own in enumerate(claims)
    ]
    for other in others:
        np.testing.assert_array_equal(other.limits_digest, found.limits_digest)
    return found


def test_totals_of_other_limits_than_most_are_refused():
    """A host has computed microbatch 0 again with other axes, and has other limits in the last bit of an exponent."""
    found = exchange(claim([7, 3], [1, 0, 0, 0]), claim([7, 4], [0, 1, 2, 0]), claim(None, [0, 0, 0, 0]))
    assert len({*found.limits_digest.tolist()}) == 3
    kept = found.drop_other_limits()
    assert kept.microbatches.tolist() == [[0, 0, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert (kept.limits_digest > 0).tolist() == [False, True, False]


def test_totals_of_the_same_limits_are_kept_on_all_hosts():
    found = exchange(claim([7, -3], [1, 0, 0, 0]), claim([7, -3], [0, 1, 0, 0]), claim(None, [0, 0, 0, 0]))
    assert found.limits_digest[0] == found.limits_digest[1] > 0 == found.limits_digest[2]
    assert found.drop_other_limits() is found
