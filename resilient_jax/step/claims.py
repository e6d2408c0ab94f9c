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
"""Stands for the digests of a state that is not compared."""


def count_claims_bytes(num_microbatches: int) -> int:
    """Return the room for a host's claims; a microbatch takes a byte, since a host has at most 127 parts."""
    num_integers, num_lengths = 1 + STATE_DIGEST_WORDS + DIGEST_WORDS, 4
    numbers_bytes = MAX_INTEGER_BYTES * (num_integers + num_lengths) + FLOAT_BYTES
    return num_microbatches + numbers_bytes + WATCH_BYTES


class HostClaims(msgspec.Struct, frozen=True, array_like=True):
    """What one host tells the others.

    Attributes:
        microbatches: for each the part that has it, as `Contributions.list_claims` numbers them.
        limits_digest: uint32 that tells limits apart, see `Contributions.limits_digest`; 0: it has none.
        seconds: time that a microbatch takes on this host; 0: unknown.
        watched: what its last steps took.
        state_digest: digests of the state that the step begins with; zeros: not compared.
        data_digest: digest of the microbatch that all hosts read; `NO_DIGEST`: not compared.
    """

    microbatches: tuple[int, ...]
    limits_digest: int
    seconds: float
    watched: WatchReport
    state_digest: tuple[int, ...] = NO_STATE_DIGEST
    data_digest: tuple[int, ...] = NO_DIGEST

    def gather(self, exchange: HostExchange) -> list["HostClaims"]:
        """Return what all hosts tell. For all hosts at once."""
        return exchange.gather(self, room_bytes=count_claims_bytes(len(self.microbatches)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What all hosts tell each other: equal on all of them, so that each may decide for all without a message.

    Attributes:
        microbatches: int32[hosts, microbatches].
        limits_digest: uint32[hosts].
        seconds: float32[hosts].
        watched: what the last steps of each host took; (): nothing was told.
    """

    microbatches: np.ndarray
    limits_digest: np.ndarray
    seconds: np.ndarray
    watched: Sequence[WatchReport]

    @classmethod
    def make_empty(cls, num_hosts: int, num_microbatches: int) -> "Claims":
        """Return the claims of hosts that have nothing and compare nothing."""
        return cls(
            microbatches=np.zeros((num_hosts, num_microbatches), np.int32),
            limits_digest=np.zeros(num_hosts, np.uint32),
            seconds=np.zeros(num_hosts, np.float32),
            watched=(),
        )

    @classmethod
    def join(cls, told: Sequence[HostClaims]) -> "Claims":
        """Return the claims of all hosts; what is compared is not among them."""
        return cls(
            microbatches=np.array([claims.microbatches for claims in told], np.int32),
            limits_digest=np.array([claims.limits_digest for claims in told], np.uint32),
            seconds=np.array([claims.seconds for claims in told], np.float32),
            watched=[claims.watched for claims in told],
        )

    def drop_other_limits(self) -> "Claims":
        """Return the claims to totals that can be added: those of other limits than most are refused.

        Microbatch 0 may have been computed again after a failure, by a host with other axes or devices: its gradients
        then differ in the last bits, and the limits that follow from them may, too.
        """
        num_claimed = np.sum(self.microbatches > 0, axis=1)
        limits_digests = [digest for digest in np.unique(self.limits_digest) if digest]
        if len(limits_digests) < 2:
            return self
        # The limits that lose the fewest microbatches. Of equals it is the lowest digest, on every host.
        kept = max(limits_digests, key=lambda digest: num_claimed[self.limits_digest == digest].sum())
        # A host without limits has single microbatches, which become totals with whatever limits there will be.
        is_refused = (self.limits_digest != kept) & (self.limits_digest != 0)
        return dataclasses.replace(
            self,
            microbatches=np.where(is_refused[:, None], 0, self.microbatches),
            limits_digest=np.where(is_refused, 0, self.limits_digest).astype(np.uint32),
        )
