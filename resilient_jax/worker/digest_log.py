"""Appends digests of sums and states to a log, every few steps (`protocol.step_digests`).

They are made on devices. An exact sum and its state have the same bits whichever hosts computed them, so that one
machine can compute a step again and compare.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from resilient_jax.ids import HostName
from resilient_jax.protocol.step_digests import ENTRY_ENCODER, DigestEntry, RunEntry, StepDigests, SumDigest
from resilient_jax.state.flat_state import FlatState, flatten_state
from resilient_jax.state.state_digest import KEY_OF_COMPLETE_STATE, digest_state
from resilient_jax.step.accumulation_call import AccumulationCall
from resilient_jax.step.assignment import ReplicaShape, count_devices_by_host
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.observers import Observer, Sums
from resilient_jax.worker.script_fingerprint import describe_script


class DigestLog:
    """The file of one worker process, which is made by its first entry.

    Args:
        on_failure: called once, with the reason, if the file cannot be written; after that nothing more is written.
    """

    def __init__(self, path: Path, host: str, on_failure: Callable[[str], object]) -> None:
        self._path = path
        self._host = host
        self._on_failure = on_failure
        self._has_begun = False
        self._has_failed = False

    def write(self, entry: DigestEntry) -> None:
        """Append an entry, the first one behind what this process runs."""
        entries = [entry] if self._has_begun else [describe_run(self._host), entry]
        if self._has_failed:
            return
        data = b"".join(ENTRY_ENCODER.encode(one) + b"\n" for one in entries)
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(data)
            self._has_begun = True
        except OSError as error:  # training goes on: only later checks of these steps are lost
            self._has_failed = True
            self._on_failure(f"{self._path}: {error.strerror}")


def open_digest_log(path: str, host: str, on_failure: Callable[[str], object]) -> DigestLog | None:
    """Return the log at a path; None if the path is empty: the job records no digests."""
    return DigestLog(Path(path), host, on_failure) if path else None


def describe_run(host: str) -> RunEntry:
    """Return what this process runs."""
    script = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]
    return RunEntry(
        host=host,
        command=(str(Path(script).absolute()), *sys.argv[1:]),
        working_directory=os.getcwd(),
        platform=jax.default_backend(),
        num_devices=jax.local_device_count(),
        script=describe_script(),
        wall_s=time.time(),
    )


class DigestObserver(Observer):
    """Writes the digests of every `interval_steps`-th step of one generation."""

    def __init__(self, log: DigestLog, host: HostName, info: GenerationInfo, interval_steps: int) -> None:
        self._log = log
        self._host = host
        self._info = info
        self._interval_steps = interval_steps
        self._sums: dict[str, SumDigest] = {}

    def on_step_begin(self, step: int) -> None:
        """Forget the sums of a step that was not committed."""
        self._sums.clear()

    def on_reduce(self, call: AccumulationCall, owners: tuple[HostName, ...], total: Sums) -> None:
        """Digest the sum."""
        if not is_recorded(call.spec.step, self._interval_steps):
            return
        self._sums[call.spec.name] = SumDigest(
            digest=_format(digest_state(flatten_state(call.spec.step, total))),
            num_microbatches=call.spec.num_microbatches,
            reduction=call.spec.reduction,
            replica=describe_replica(
                call.replica_shape, jax.local_device_count(), count_devices_by_host(call.devices)
            ),
        )

    def on_commit(self, state: FlatState) -> None:
        """Digest the state, and write the entry."""
        if not is_recorded(state.step - 1, self._interval_steps):
            return
        words = digest_state(state)
        self._log.write(
            StepDigests(
                host=self._host,
                generation=self._info.number,
                step=state.step - 1,
                sums=dict(self._sums),
                state=_format(words) if words[0] == KEY_OF_COMPLETE_STATE else "",
            )
        )


def is_recorded(step: int, interval_steps: int) -> bool:
    """Return whether the digests of a step are recorded: of the last of each interval; 0: of none.

    >>> [step for step in range(12) if is_recorded(step, 4)]
    [3, 7, 11]
    """
    return interval_steps > 0 and (step + 1) % interval_steps == 0


def describe_replica(shape: ReplicaShape, num_devices: int, device_counts: Sequence[int]) -> str:
    """Return on what a microbatch is computed on a host with `num_devices`, such as "2 devices of one host".

    >>> describe_replica(ReplicaShape(per_host="devices"), 4, [4, 3])
    '1 device of one host'
    """
    count = shape.count_devices(num_devices, device_counts)
    where = "one host" if shape.hosts == 1 else f"{shape.hosts} hosts"
    own = shape.for_host(num_devices).axes
    axes = f" as {dict(own)}" if own else ""
    return f"{count} device{'s' if count > 1 else ''} of {where}{axes}"


def _format(words: np.ndarray) -> str:
    """Return the digest of complete leaves, without its key, in 16 hexadecimal digits."""
    return "".join(f"{word:08x}" for word in words[1:3].view(np.uint32).tolist())
