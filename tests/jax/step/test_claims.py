"""What hosts tell each other before an accumulation: totals that can be added."""

import msgspec
import numpy as np

from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.state.state_digest import DIGEST_WORDS, STATE_DIGEST_WORDS
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.claims import Claims, HostClaims, count_claims_bytes
from resilient_jax.step.contributions import Contributions
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.slow_host_watch import encode_timings
from resilient_jax.step.watch_report import Measurement, WatchReport
from tests.support.summing_hosts import SummingHosts

SPEC = AccumulationSpec(name="", step=0, num_microbatches=4, reduction="exact")


def claim(limits, microbatches):
    own = Contributions(SPEC, limits=None if limits is None else np.array(limits, np.int32))
    return HostClaims(
        microbatches=tuple(microbatches),
        limits_digest=own.limits_digest,
        seconds=0.0,
        watched=WatchReport(),
    )


def exchange(*claims):
    """Return the claims of all hosts, as each of them would have them."""
    hosts = SummingHosts(len(claims))
    (found, *others) = hosts.run(lambda exchange: Claims.join(claims[exchange.host_index].gather(exchange)))
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


def test_the_longest_claims_have_room_so_they_are_told_in_one_round():
    work = ReplicaWork(0, 2**31 - 1, 1e30, 1e30, 1e-30, 1e-30)
    timing = StepTiming(2**31 - 1, (work,), 1e9, received_bytes=1e30, received_s=1e9)
    longest = HostClaims(
        microbatches=(127,) * 4096,
        limits_digest=2**32 - 1,
        seconds=1 / 3,
        watched=WatchReport(encode_timings([timing] * EXCHANGE_INTERVAL_STEPS), ~Measurement.NOTHING),
        state_digest=(-(2**31),) * STATE_DIGEST_WORDS,
        data_digest=(2**31 - 1,) * DIGEST_WORDS,
    )
    assert len(msgspec.msgpack.encode(longest)) <= count_claims_bytes(4096)
