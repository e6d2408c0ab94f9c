"""What hosts read of a step. Digests of a microbatch that all read, to notice data that are not the same in each read.

Work is done again after a failure, by any host, so every host must read the same arrays for the same step and index.
In steps in which hosts compare, all of them read one microbatch of the step. A `Prefetcher` has read it before, and
gives the host that computes it the very arrays that were compared. Of a compute function that reads its data itself a
call is traced (`traced_call`), with what it has read.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart
from resilient_jax.state.array_digest import add_array
from resilient_jax.state.state_digest import DIGEST_WORDS, make_no_digest
from resilient_jax.step.assignment import AccumulationSpec, Assignment, replica_speeds
from resilient_jax.step.batch_source import BatchSource
from resilient_jax.step.quotas import distribute_microbatches
from resilient_jax.step.replicas import Replica

DigestFunction = Callable[[int, int], np.ndarray]
"""Reads the microbatch of (step, index), and returns its digest, int32[DIGEST_WORDS]."""
COMPARISON_INTERVAL_STEPS: Final = 64
"""Steps between two comparisons of the hosts' states, that of the initial state first, and of what they read as the
same microbatch. To digest a state reads it once: less than a thousandth of the time of so many steps."""
STEPS_BACK: Final = 2
"""A microbatch of so many steps ago is kept by nobody: each call reads it anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataSample:
    """A microbatch that is read by all hosts; by a host alone twice.

    Attributes:
        step: number of the step that it belongs to.
        index: position in that step.
        num_reads: how often each host reads it.
    """

    step: int
    index: int
    num_reads: int

    @classmethod
    def choose(cls, step: int, num_microbatches: int, num_hosts: int) -> "DataSample":
        """Return what is read in a step, the same on all hosts."""
        # Steps in which hosts compare are multiples of a number; a hash of them comes to every index.
        index = int.from_bytes(hashlib.blake2b(b"%d" % step).digest()) % num_microbatches
        if num_hosts > 1:
            return cls(step, index, 1)
        return cls(max(0, step - STEPS_BACK), index, 2)

    def read(self, digest_read: DigestFunction) -> np.ndarray:
        """Return int32[num_reads, DIGEST_WORDS], the digest of each read of this host."""
        return np.array([self._read_once(digest_read) for _ in range(self.num_reads)])

    def _read_once(self, digest_read: DigestFunction) -> np.ndarray:
        try:
            return digest_read(self.step, self.index)
        # The host that computes the microbatch reads it, too, and raises the error with the user's stack.
        except Exception:
            return make_no_digest()


def digest_data(data: BatchSource, step: int, index: int) -> np.ndarray:
    """Return int32[DIGEST_WORDS], the digest of all rows of a microbatch."""
    return digest_batch(data.get(step, index, ALL_ROWS))


def digest_batch(batch: Any) -> np.ndarray:  # noqa: ANN401 - a user's tree
    """Return int32[DIGEST_WORDS], the digest of all bits of a microbatch, with its paths, dtypes and shapes.

    Raises:
        TypeError: a leaf consists of Python objects: there are only their addresses to compare.
    """
    digest = hashlib.blake2b(digest_size=4 * DIGEST_WORDS)
    for path, leaf in jax.tree.leaves_with_path(batch):
        if np.asarray(leaf).dtype.hasobject:
            raise TypeError(f"found Python objects at {jax.tree_util.keystr(path)}, expected an array")
        add_array(digest, jax.tree_util.keystr(path), leaf)
    return np.frombuffer(digest.digest(), np.int32)


def announce_reads(
    data: BatchSource,
    spec: AccumulationSpec,
    assignment: Assignment,
    replicas: dict[int, Replica],
    speeds: np.ndarray,
) -> None:
    """Announce what this host reads in this step, and in the next step if no host dies."""
    all_indexes = range(spec.num_microbatches)
    next_step = distribute_microbatches(all_indexes, replica_speeds(assignment.locations, speeds))

    def list_reads(step: int, by_replica: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, RowPart]]:
        for number, replica in replicas.items():
            for index in by_replica[number]:
                yield step, index, replica.data_shard

    # A host alone reads its sample twice, so not ahead: both reads would return what was read once.
    is_sampled = (spec.step + 1) % COMPARISON_INTERVAL_STEPS == 0 and len(speeds) > 1
    sample = DataSample.choose(spec.step + 1, spec.num_microbatches, len(speeds))
    sampled = [(sample.step, sample.index, ALL_ROWS)] * is_sampled
    data.expect(
        [*list_reads(spec.step, assignment.by_replica), *sampled, *list_reads(spec.step + 1, next_step)]
    )
