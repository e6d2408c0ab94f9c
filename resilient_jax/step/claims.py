"""What a host tells the others before an accumulation: its microbatches, what they took, and digests to compare."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from resilient_jax.state.state_digest import (
    DIGEST_WORDS,
    STATE_DIGEST_WORDS,
    make_no_digest,
    make_no_state_digest,
)
from resilient_jax.step.row_exchange import exchange_rows, pad_rows_size
from resilient_jax.step.slow_host_watch import WATCH_WORDS, make_empty_row


def pad_claims_size(num_microbatches: int, num_hosts: int) -> int:
    """Return the size of the vector in which hosts exchange their claims."""
    return pad_rows_size(num_hosts, num_microbatches + 2 + WATCH_WORDS + STATE_DIGEST_WORDS + DIGEST_WORDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What one host tells the others, or, with a first dimension more, what all hosts do.

    Attributes:
        microbatches: int32[microbatches], as `Contributions.list_claims` gives them.
        limits_digest: uint32[], of the limits of this accumulation that it has; 0: it has none.
        seconds: float32[], that a microbatch takes on it; 0: unknown.
        watched: int32[WATCH_WORDS], what its last steps took; see `SlowHostWatch.take_row`.
        state_digest: int32[STATE_DIGEST_WORDS], of the state that the step begins with; zeros: not compared.
        data_digest: int32[DIGEST_WORDS], of the microbatch that all hosts read; `NO_DIGEST`: not compared.
    """

    microbatches: np.ndarray
    limits_digest: np.ndarray
    seconds: np.ndarray
    watched: np.ndarray
    state_digest: np.ndarray = dataclasses.field(default_factory=make_no_state_digest)
    data_digest: np.ndarray = dataclasses.field(default_factory=make_no_digest)

    @classmethod
    def make_empty(cls, num_hosts: int, num_microbatches: int) -> "Claims":
        """Return the claims of hosts that have nothing and compare nothing."""
        return cls(
            microbatches=np.zeros((num_hosts, num_microbatches), np.int32),
            limits_digest=np.zeros(num_hosts, np.uint32),
            seconds=np.zeros(num_hosts, np.float32),
            watched=np.tile(make_empty_row(), (num_hosts, 1)),
            state_digest=np.tile(make_no_state_digest(), (num_hosts, 1)),
            data_digest=np.tile(make_no_digest(), (num_hosts, 1)),
        )

    def exchange(self, host_index: int, num_hosts: int, all_reduce: Callable[[np.ndarray], Any]) -> "Claims":
        """Return the claims of all hosts. For all hosts at once; see `exchange_rows`."""
        # The bits of a float as an integer: all of it is one row of integers.
        seconds = self.seconds.astype(np.float32).view(np.int32)
        limits_digest = self.limits_digest.astype(np.uint32).view(np.int32)
        parts = self.microbatches, limits_digest, seconds, self.watched, self.state_digest, self.data_digest
        row = np.concatenate([np.atleast_1d(part).astype(np.int32) for part in parts])
        rows = exchange_rows(row, host_index, num_hosts, all_reduce)
        # Where the parts begin and end, but for the last one.
        ends = np.cumsum([part.size for part in parts])[:-1]
        microbatches, limits_digest, seconds, watched, state_digest, data_digest = np.split(
            rows, ends, axis=1
        )
        return Claims(
            microbatches=microbatches,
            limits_digest=np.ascontiguousarray(limits_digest[:, 0]).view(np.uint32),
            seconds=np.ascontiguousarray(seconds[:, 0]).view(np.float32),
            watched=watched,
            state_digest=state_digest,
            data_digest=data_digest,
        )

    def drop_other_limits(self) -> "Claims":
        """Return the claims to totals that can be added: those of other limits than most are refused.

        Of all hosts' claims. Microbatch 0 may have been computed again after a failure, by a host with other axes or
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
