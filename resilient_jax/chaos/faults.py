"""What can be done to a job: the closed set of faults, as a manifest names them by their `kind`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from resilient_jax.config.job_config import Seconds

Share = Annotated[float, Meta(gt=0, lt=1)]
Percent = Annotated[float, Meta(gt=0, le=100)]


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A fault of one kind."""


# From outside: signals.


class Kill(_Fault, frozen=True, tag="kill"):
    """SIGKILL."""


class Stop(_Fault, frozen=True, tag="stop"):
    """SIGSTOP; SIGCONT after `for_s`, or when the event `until` comes. Without either it stays stopped to the end, and
    is woken then: a zombie that must be fenced."""

    for_s: Seconds | None = None
    until: str | None = None


class Slow(_Fault, frozen=True, tag="slow"):
    """Gets this share of the processor time of one core, by a quota of its control group; else by stopping it for the
    rest of each 40 ms."""

    share: Share
    for_s: Seconds


# From inside a worker's main thread, at a place in a step.


class Exit(_Fault, frozen=True, tag="exit"):
    """The process exits with this code. 75 asks to be started again; any other is the script's own failure."""

    code: Annotated[int, Meta(ge=0, le=255)]


class Raise(_Fault, frozen=True, tag="raise"):
    """An exception in the user's code."""


class Hang(_Fault, frozen=True, tag="hang"):
    """The main thread does nothing more for so long; the others go on."""

    for_s: Seconds


class Nan(_Fault, frozen=True, tag="nan"):
    """The running sum of the host's gradients becomes NaN, with all that it counts, after a microbatch."""


# The network. Hosts must be in namespaces of their own.


class Partition(_Fault, frozen=True, tag="partition"):
    """The host's link is down: packets vanish and nobody is told."""

    for_s: Seconds


class SlowLink(_Fault, frozen=True, tag="slow_link"):
    """The host's link carries no more than this (`tc tbf`)."""

    mbit_s: Annotated[float, Meta(gt=0)]
    for_s: Seconds


class LossyLink(_Fault, frozen=True, tag="lossy_link"):
    """The host's link loses packets (`tc netem`)."""

    percent: Percent
    for_s: Seconds


# Damage.


class Flip(_Fault, frozen=True, tag="flip"):
    """One bit of each of `count` bytes is turned over: in memory, in a file, or on the way.

    Attributes:
        where: a region of the host's newest snapshot; "checkpoint": the largest file of the newest one below `path`;
            "message": of the next bytes that a snapshot server sends one bit, whatever `count`, after their digest was
            made (what changes on a real link is found by TCP, below it).
        path: a folder of checkpoints, relative to the campaign's.
    """

    where: Annotated[str, Meta(pattern="^(arena|parity|manifest|mark|checkpoint|message)$")] = "arena"
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    path: str = ""


# What a machine runs out of.


class FullDisk(_Fault, frozen=True, tag="full_disk"):
    """The disk that the run folder is on has no byte left. The job must have a disk of its own (`job.disk_mib`)."""

    for_s: Seconds


class FullMemory(_Fault, frozen=True, tag="full_memory"):
    """The process gets no more memory from the kernel: RLIMIT_AS at what it has."""

    for_s: Seconds


class NoDescriptors(_Fault, frozen=True, tag="no_descriptors"):
    """The process can open nothing more: RLIMIT_NOFILE at what it has."""

    for_s: Seconds


class ClockJump(_Fault, frozen=True, tag="clock_jump"):
    """The wall clock of this machine is set this much ahead (back, if negative), and set back by as much later. All
    programs see it, so the manifest must allow it (`job.may_set_clock`)."""

    seconds: float
    for_s: Seconds = 10.0


Fault = (
    Kill
    | Stop
    | Slow
    | Exit
    | Raise
    | Hang
    | Nan
    | Partition
    | SlowLink
    | LossyLink
    | Flip
    | FullDisk
    | FullMemory
    | NoDescriptors
    | ClockJump
)
INNER_FAULTS = (Exit, Raise, Hang, Nan)
"""Made inside the worker, by an order for a place in a step."""
NETWORK_FAULTS = (Partition, SlowLink, LossyLink)
PASSING_FAULTS = (
    Stop,
    Slow,
    Hang,
    Partition,
    SlowLink,
    LossyLink,
    FullDisk,
    FullMemory,
    NoDescriptors,
    ClockJump,
)
"""With a lifetime: their processes may well go on as if nothing had been."""


def is_of_message(fault: Fault) -> bool:
    """Whether it turns bits over on the way: the sender does it itself, at a place."""
    return isinstance(fault, Flip) and fault.where == "message"


def kind_of(fault: Fault) -> str:
    """As the manifest has it."""
    return str(fault.__struct_config__.tag)


def lifetime_s(fault: Fault) -> float | None:
    """After which it ends by itself; None if nothing ends, or not by time."""
    return fault.for_s if isinstance(fault, PASSING_FAULTS) else None
