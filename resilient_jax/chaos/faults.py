"""The closed set of faults that a campaign can make; a manifest names them by their `kind`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from resilient_jax.config.job_config import Seconds

Share = Annotated[float, Meta(gt=0, lt=1)]
Percent = Annotated[float, Meta(gt=0, le=100)]


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A fault of one kind."""


# From outside: signals.


class ProcessKill(_Fault, frozen=True, tag="kill"):
    """SIGKILL."""


class ProcessStop(_Fault, frozen=True, tag="stop"):
    """SIGSTOP, then SIGCONT after `duration_s` or at the event `until_event`.

    Without either the process stays stopped until all incidents are over: a zombie that must be fenced.
    """

    duration_s: Seconds | None = None
    until_event: str | None = None


class SlowProcess(_Fault, frozen=True, tag="slow"):
    """A share of the time of one core, by a quota of a control group, else by stopping for the rest of each 40 ms."""

    share: Share
    duration_s: Seconds


# From inside a worker's main thread, at a place in a step.


class ProcessExit(_Fault, frozen=True, tag="exit"):
    """The process exits with this code: 75 asks for a restart, any other is the script's own failure."""

    code: Annotated[int, Meta(ge=0, le=255)]


class UserException(_Fault, frozen=True, tag="raise"):
    """An exception in the user's code."""


class MainThreadHang(_Fault, frozen=True, tag="hang"):
    """The main thread does nothing for so long; the other threads continue."""

    duration_s: Seconds


class NanGradients(_Fault, frozen=True, tag="nan"):
    """The host's gradient accumulator becomes NaN after a microbatch, with everything else that is accumulated."""


# The network. Hosts must be in namespaces of their own.


class NetworkPartition(_Fault, frozen=True, tag="partition"):
    """The host's link is down: packets vanish without an error."""

    duration_s: Seconds


class SlowLink(_Fault, frozen=True, tag="slow_link"):
    """The host's link carries no more than this (`tc tbf`)."""

    mbit_per_s: Annotated[float, Meta(gt=0)]
    duration_s: Seconds


class LossyLink(_Fault, frozen=True, tag="lossy_link"):
    """The host's link loses packets (`tc netem`)."""

    percent: Percent
    duration_s: Seconds


# Damage.


class BitFlip(_Fault, frozen=True, tag="flip"):
    """One bit of each of `count` bytes is flipped: in memory, in a file, or in a message.

    Attributes:
        region: of the host's newest snapshot; or "checkpoint": the largest file of the newest checkpoint in `path`; or
            "message": one bit, whatever `count`, of the next bytes that a snapshot server sends, after their digest was
            made (TCP finds what changes on a real link).
        path: a folder of checkpoints, relative to the campaign's.
    """

    region: Annotated[str, Meta(pattern="^(part|parity|manifest|mark|checkpoint|message)$")] = "part"
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    path: str = ""


# Resources that are used up.


class FullDisk(_Fault, frozen=True, tag="full_disk"):
    """The run folder's disk has no byte left. The job must have a disk of its own (`job.disk_mib`)."""

    duration_s: Seconds


class FullMemory(_Fault, frozen=True, tag="full_memory"):
    """The process gets no more memory from the kernel: RLIMIT_AS at what it has."""

    duration_s: Seconds


class NoDescriptors(_Fault, frozen=True, tag="no_descriptors"):
    """The process can open nothing more: RLIMIT_NOFILE at what it has."""

    duration_s: Seconds


class ClockJump(_Fault, frozen=True, tag="clock_jump"):
    """The wall clock of this machine is set ahead by `jump_s` (back, if negative), and reset by as much later.

    All programs see the jump, so the manifest must allow it (`job.may_set_clock`).
    """

    jump_s: float
    duration_s: Seconds = 10.0


Fault = (
    ProcessKill
    | ProcessStop
    | SlowProcess
    | ProcessExit
    | UserException
    | MainThreadHang
    | NanGradients
    | NetworkPartition
    | SlowLink
    | LossyLink
    | BitFlip
    | FullDisk
    | FullMemory
    | NoDescriptors
    | ClockJump
)
WORKER_FAULTS = (ProcessExit, UserException, MainThreadHang, NanGradients)
"""Faults that a worker makes itself, by an order for a failpoint."""
NETWORK_FAULTS = (NetworkPartition, SlowLink, LossyLink)
TEMPORARY_FAULTS = (
    ProcessStop,
    SlowProcess,
    MainThreadHang,
    NetworkPartition,
    SlowLink,
    LossyLink,
    FullDisk,
    FullMemory,
    NoDescriptors,
    ClockJump,
)
"""Faults with a duration; their processes may continue as before."""


def is_message_flip(fault: Fault) -> bool:
    """Return whether the fault flips bits of a message: the sender does that itself, at a failpoint."""
    return isinstance(fault, BitFlip) and fault.region == "message"


def fault_kind(fault: Fault) -> str:
    """Return the `kind` of the fault in a manifest."""
    return str(fault.__struct_config__.tag)


def fault_duration_s(fault: Fault) -> float | None:
    """Return the time after which the fault ends by itself; None if it does not, or not by time."""
    return fault.duration_s if isinstance(fault, TEMPORARY_FAULTS) else None
