"""What a host tells the others before an accumulation: its microbatches, what they took, and digests to compare."""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from resilient_jax.host_exchange import FLOAT_BYTES, MAX_INTEGER_BYTES, HostExchange
from resilient_jax.state.state_digest import DIGEST_WORDS, NO_DIGEST, STATE_DIGEST_WORDS
from resilient_jax.step.slow_host_watch import WATCH_BYTES
from resilient_jax.step.watch_report import WatchReport

NO_STATE_DIGEST = (0,) * STATE_DIGEST_WORDS
"""In place of the digests of a state that is not compared."""


def count_claims_bytes(num_microbatches: int) -> int:
    """Return the room for a host's claims, whose microbatches are in at most 127 parts: a byte for each."""
    num_integers, num_lengths = 1 + STATE_DIGEST_WORDS + DIGEST_WORDS, 4
    numbers_bytes = MAX_INTEGER_BYTES * (num_integers + num_lengths) + FLOAT_BYTES
    return num_microbatches + numbers_bytes + WATCH_BYTES


class HostClaims(msgspec.Struct, frozen=True, array_like=True):
    """What one host tells the others.

    Attributes:
        microbatches: as `Contributions.list_claims` gives them.
        limits_digest: uint32, of the limits of this accumulation that it has; 0: it has none.
        seconds: that a microbatch takes on it; 0: unknown.
        watched: what its last steps took.
        state_digest: of the state that the step begins with; zeros: not compared.
        data_digest: of the microbatch that all hosts read; `NO_DIGEST`: not compared.
    """

    microbatches: tuple[int, ...]
    limits_digest: int
    seconds: float
    watched: WatchReport
    state_digest: tuple[int, ...] = NO_STATE_DIGEST
    data_digest: tuple[int, ...] = NO_DIGEST


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What all hosts tell each other.

    Attributes:
        microbatches: int32[hosts, microbatches].
        limits_digest: uint32[hosts].
        seconds: float32[hosts].
        watched: what the last steps of each host took; (): nothing was told.
        state_digest: int32[hosts, STATE_DIGEST_WORDS].
        data_digest: int32[hosts, DIGEST_WORDS].
    """

    microbatches: np.ndarray
    limits_digest: np.ndarray
    seconds: np.ndarray
    watched: Sequence[WatchReport]
    state_digest: np.ndarray
    data_digest: np.ndarray

    @classmethod
    def make_empty(cls, num_hosts: int, num_microbatches: int) -> "Claims":
        """Return the claims of hosts that have nothing and compare nothing."""
        return cls(
            microbatches=np.zeros((num_hosts, num_microbatches), np.int32),
            limits_digest=np.zeros(num_hosts, np.uint32),
            seconds=np.zeros(num_hosts, np.float32),
            watched=(),
            state_digest=np.zeros((num_hosts, STATE_DIGEST_WORDS), np.int32),
            data_digest=np.tile(np.array(NO_DIGEST, np.int32), (num_hosts, 1)),
        )

    @classmethod
    def gather(cls, exchange: HostExchange, own: HostClaims) -> "Claims":
        """Return the claims of all hosts. For all hosts at once."""
        found = exchange.gather(own, room_bytes=count_claims_bytes(len(own.microbatches)))
        return cls(
            microbatches=np.array([one.microbatches for one in found], np.int32),
            limits_digest=np.array([one.limits_digest for one in found], np.uint32),
            seconds=np.array([one.seconds for one in found], np.float32),
            watched=[one.watched for one in found],
            state_digest=np.array([one.state_digest for one in found], np.int32),
            data_digest=np.array([one.data_digest for one in found], np.int32),
        )

    def drop_other_limits(self) -> "Claims":
        """Return the claims to totals that can be added: those of other limits than most are refused.

        Microbatch 0 may have been computed again after a failure, by a host with other axes or
        devices: its gradients then differ in the last bits, and the limits that follow from them may, too. All hosts
        decide it from the same table.
        """
        claimed = np.sum(self.microbatches > 0, axis=1)
        found = [digest for digest in np.unique(self.limits_digest) if digest]
        if len(found) < 2:
            return self
        most = max(found, key=lambda digest: claimed[self.limits_digest == digest].sum())
        is_refused = (self.limits_digest != most) & (self.limits_digest != 0)
        return dataclasses.replace(
            self,
            microbatches=np.where(is_refused[:, None], 0, self.microbatches),
            limits_digest=np.where(is_refused, 0, self.limits_digest).astype(np.uint32),
        )
