"""What follows when hosts differ: a host with another state starts again with that of most; other data are reported.

States are equal by construction: every host makes the same update of the same sums. They differ when a host's script,
initial state, library or processor does, or when its memory or an update was wrong. Digests are compared every
few steps, so the sums since the last comparison have what that host has computed.
"""

import os
import sys
from collections.abc import Sequence

import numpy as np

from resilient_jax.errors import StateError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from resilient_jax.state.state_digest import find_differing, find_differing_copies
from resilient_jax.step.data_sample import DataSample
from resilient_jax.worker.training_control import TrainingControl

REASONS = (
    "Every host must run the same script with the same arguments and library versions, make the same initial state, "
    "and have the same kind of processor; else memory or a processor is at fault"
)
DATA_REASONS = (
    "What is computed again after a failure, or on another host, is now computed from other data. Data must depend on "
    "the seed, the step and the index alone: let rj.data.make_microbatch_data shuffle, make random numbers from "
    "(seed, step, index), and give every host the same files"
)


class HostComparison:
    """Compares the hosts' digests of the state, and of data that all of them have read.

    Args:
        hosts: hosts of the generation, in the order of the digests.
    """

    def __init__(self, hosts: Sequence[HostName], host: HostName, control: TrainingControl) -> None:
        self._hosts = tuple(hosts)
        self._host = host
        self._control = control
        self._has_reported_data = False

    def compare_states(self, digests: np.ndarray, num_steps: int) -> None:
        """Return if what this host has of the state after `num_steps` steps is what most hosts have that have it.

        Else this process ends, and its agent starts another, which gets the state from the others.

        Raises:
            StateError: no state is the one that most hosts have.
        """
        differing, has_majority = find_differing_copies(digests)
        if not differing:
            return
        names = ", ".join(self._hosts[index] for index in differing)
        self._control.record_event(EventKind.STATE_DIFFERS, hosts=names, steps=num_steps)
        if not has_majority:
            raise StateError(
                f"the state after {num_steps} steps: found another on each of {names}, or none that most hosts have; "
                f"expected the same bits everywhere. {REASONS}"
            )
        if self._host in names.split(", "):
            sys.stderr.write(
                f"the state of {self._host} after {num_steps} steps differs from that of most hosts; starting again "
                f"with theirs. {REASONS}\n"
            )
            sys.stderr.flush()
            # At once: to unwind would wait for peers that wait for this host.
            os._exit(RESTART_EXIT_CODE)

    def compare_data(self, sample: DataSample, digests: np.ndarray) -> None:
        """Report a microbatch of which not all reads returned the same: in an event, and once in the first host's log.

        Training goes on: without failures such data are as good as any.

        Args:
            digests: int32[hosts, DIGEST_WORDS], or, of a host alone, int32[num_reads, DIGEST_WORDS].
        """
        differing, has_majority = find_differing(digests.tolist())
        if not differing:
            return
        is_alone = len(self._hosts) == 1
        names = self._host if is_alone else ", ".join(self._hosts[index] for index in differing)
        self._control.record_event(
            EventKind.DATA_DIFFERS, step=sample.step, hosts=names, microbatch=sample.index
        )
        if self._has_reported_data or self._host != self._hosts[0]:
            return
        self._has_reported_data = True
        found = f"different arrays in two reads on {names}" if is_alone else f"other arrays on {names}"
        expected = "those of most hosts" if has_majority else "the same in each read"
        sys.stderr.write(
            f"data: microbatch {sample.index} of step {sample.step}: found {found}, expected {expected}. "
            f"{DATA_REASONS}\n"
        )
        sys.stderr.flush()
