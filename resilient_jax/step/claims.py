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
        has_limits: bool[], whether it has the limits of this accumulation.
        seconds: float32[], that a microbatch takes on it; 0: unknown.
        watched: int32[WATCH_WORDS], what its last steps took; see `SlowHostWatch.take_row`.
        state_digest: int32[STATE_DIGEST_WORDS], of the state that the step begins with; zeros: not compared.
        data_digest: int32[DIGEST_WORDS], of the microbatch that all hosts read; `NO_DIGEST`: not compared.
    """

    microbatches: np.ndarray
    has_limits: np.ndarray
    seconds: np.ndarray
    watched: np.ndarray
    state_digest: np.ndarray = dataclasses.field(default_factory=make_no_state_digest)
    data_digest: np.ndarray = dataclasses.field(default_factory=make_no_digest)

    @classmethod
    def make_empty(cls, num_hosts: int, num_microbatches: int) -> "Claims":
        """Return the claims of hosts that have nothing and compare nothing."""
        return cls(
            microbatches=np.zeros((num_hosts, num_microbatches), np.int32),
            has_limits=np.zeros(num_hosts, bool),
            seconds=np.zeros(num_hosts, np.float32),
            watched=np.tile(make_empty_row(), (num_hosts, 1)),
            state_digest=np.tile(make_no_state_digest(), (num_hosts, 1)),
            data_digest=np.tile(make_no_digest(), (num_hosts, 1)),
        )

    def exchange(self, host_index: int, num_hosts: int, all_reduce: Callable[[np.ndarray], Any]) -> "Claims":
        """Return the claims of all hosts. For all hosts at once; see `exchange_rows`."""
        # The bits of a float as an integer: all of it is one row of integers.
        seconds = self.seconds.astype(np.float32).view(np.int32)
        parts = self.microbatches, self.has_limits, seconds, self.watched, self.state_digest, self.data_digest
        row = np.concatenate([np.atleast_1d(part).astype(np.int32) for part in parts])
        rows = exchange_rows(row, host_index, num_hosts, all_reduce)
        # Where the parts begin and end, but for the last one.
        limits = np.cumsum([part.size for part in parts])[:-1]
        microbatches, has_limits, seconds, watched, state_digest, data_digest = np.split(rows, limits, axis=1)
        return Claims(
            microbatches=microbatches,
            has_limits=has_limits[:, 0] > 0,
            seconds=np.ascontiguousarray(seconds[:, 0]).view(np.float32),
            watched=watched,
            state_digest=state_digest,
            data_digest=data_digest,
        )
