"""The closed set of faults that a campaign can inject; a manifest names them by their `kind`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from resilient_jax.config.job_config import Seconds

Share = Annotated[float, Meta(gt=0, lt=1)]
Percent = Annotated[float, Meta(gt=0, le=100)]


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A fault of one kind."""


# From outside: signals.


class ProcessKill(_Fault, frozen=True, tag="kill"):
    """SIGKILL to the target's processes."""


class ProcessStop(_Fault, frozen=True, tag="stop"):
    """SIGSTOP, then SIGCONT after `duration_s` or at the event `until_event`.

    Without either the process stays stopped until all incidents have ended: a zombie that must be fenced.
    """

    duration_s: Seconds | None = None
    until_event: str | None = None


class SlowProcess(_Fault, frozen=True, tag="slow"):
    """A limit to a share of one core: by the quota of a control group, else by SIGSTOP for the rest of each 40 ms.

    It ends after `duration_s`, or sooner at the event `until_event`.
    """

    share: Share
    duration_s: Seconds
    until_event: str | None = None


class Notice(_Fault, frozen=True, tag="notice"):
    """A signal that schedulers and operators send, `times` times within half a second.

    To an agent it is a notice to leave; the other processes of a job must not end by it.
    """

    signal: Literal["TERM", "HUP", "USR1", "USR2"] = "TERM"
    times: Annotated[int, Meta(ge=1, le=10)] = 1


# From inside a worker's main thread, at a failpoint in a step.


class ProcessExit(_Fault, frozen=True, tag="exit"):
    """An exit of the process with this code: 75 asks for a restart, any other is the script's own failure."""

    code: Annotated[int, Meta(ge=0, le=255)]


class UserException(_Fault, frozen=True, tag="raise"):
    """An exception in the user's code."""


class MainThreadHang(_Fault, frozen=True, tag="hang"):
    """A hang of the main thread for `duration_s`; the other threads continue."""

    duration_s: Seconds


class SlowInput(_Fault, frozen=True, tag="slow_input"):
    """An input that takes `delay_s` longer for each microbatch, at the failpoint `before_input`.

    It ends after `duration_s`, or sooner at the event `until_event`.
    """

    delay_s: Seconds
    duration_s: Seconds
    until_event: str | None = None


class NanGradients(_Fault, frozen=True, tag="nan"):
    """NaN in the host's accumulator after a microbatch: in the gradient and all else that is accumulated."""


class SilentCorruption(_Fault, frozen=True, tag="corrupt"):
    """One wrong bit in the host's gradients of a microbatch, which stay finite: once, or in every one from then on.

    Only an audit notices; `job.config` must have as many (`audit_share`) as are to find it.
    """

    is_repeated: bool = False


# Devices.


class DeviceLoss(_Fault, frozen=True, tag="lose_device"):
    """A device of the target's host, by its number from 0, that is out for `duration_s`, or until `until_event`.

    As when an operator drains it: the worker is started again without it when others have all of the state.
    """

    device: Annotated[int, Meta(ge=0, le=63)]
    duration_s: Seconds
    until_event: str | None = None


class SlowDevice(_Fault, frozen=True, tag="slow_device"):
    """A device of the target's host, by its number from 0, on which all takes `factor` times as long.

    What a worker has computed on it is held for the rest of that time, measurements included, at the failpoint
    `on_device`. It ends after `duration_s`, or sooner at the event `until_event`.
    """

    device: Annotated[int, Meta(ge=0, le=63)]
    factor: Annotated[float, Meta(gt=1, le=100)]
    duration_s: Seconds
    until_event: str | None = None


# The network. Each host must have a network namespace of its own.


class NetworkPartition(_Fault, frozen=True, tag="partition"):
    """A host's link that is down: packets are lost without an error."""

    duration_s: Seconds


class PairPartition(_Fault, frozen=True, tag="cut_pair"):
    """Two hosts that cannot reach each other, but everybody else: packets between them are dropped without an error."""

    duration_s: Seconds


class SlowLink(_Fault, frozen=True, tag="slow_link"):
    """A host's link that is limited to this rate (`tc tbf`).

    It ends after `duration_s`, or sooner at the event `until_event`.
    """

    mbit_per_s: Annotated[float, Meta(gt=0)]
    duration_s: Seconds
    until_event: str | None = None


class LossyLink(_Fault, frozen=True, tag="lossy_link"):
    """A host's link that loses this share of its packets (`tc netem`)."""

    percent: Percent
    duration_s: Seconds


class Flood(_Fault, frozen=True, tag="flood"):
    """Strangers at all ports of the target's processes: idle connections, and others that send what nobody understands.

    Attributes:
        connections: how many are idle, over all ports.
    """

    duration_s: Seconds
    connections: Annotated[int, Meta(ge=1, le=10_000)] = 600


# Around the job.


class StuckOutput(_Fault, frozen=True, tag="stuck_output"):
    """A reader of the output of `launch` that reads nothing, as a pager or a terminal after Ctrl-S."""

    duration_s: Seconds


class ScriptEdit(_Fault, frozen=True, tag="edit_script"):
    """A script that is overwritten while the job runs, by one that does not train."""


# Corruption.


class BitFlip(_Fault, frozen=True, tag="flip"):
    """A flip of one bit in each of `count` bytes: in memory, in a file, or in a message.

    Attributes:
        region: a region of the host's newest snapshot; or "checkpoint": the largest file of the newest checkpoint in
            `path`; or "message": one bit, whatever `count`, of the next bytes that a snapshot server sends, flipped
            after their digest is computed (corruption on a real link is found by TCP).
        path: a folder of checkpoints, relative to the campaign's folder.
    """

    region: Annotated[str, Meta(pattern="^(part|parity|manifest|mark|checkpoint|message)$")] = "part"
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    path: str = ""


# Exhausted resources.


class FullDisk(_Fault, frozen=True, tag="full_disk"):
    """A run folder's disk without free space. The job must have a disk of its own (`job.disk_mib`)."""

    duration_s: Seconds


class FullMemory(_Fault, frozen=True, tag="full_memory"):
    """A process that gets no more memory from the kernel: RLIMIT_AS is its present size."""

    duration_s: Seconds


class NoDescriptors(_Fault, frozen=True, tag="no_descriptors"):
    """A process that can open no more files: RLIMIT_NOFILE is just above its highest descriptor."""

    duration_s: Seconds


class ClockJump(_Fault, frozen=True, tag="clock_jump"):
    """A jump of this machine's wall clock by `jump_s` (back, if negative), which is reverted after `duration_s`.

    All programs see the jump, so the manifest must allow jumps (`job.may_set_clock`).
    """

    jump_s: float
    duration_s: Seconds = 10.0


Fault = (
    ProcessKill
    | ProcessStop
    | SlowProcess
    | Notice
    | ProcessExit
    | UserException
    | MainThreadHang
    | SlowInput
    | NanGradients
    | SilentCorruption
    | DeviceLoss
    | SlowDevice
    | NetworkPartition
    | PairPartition
    | SlowLink
    | LossyLink
    | Flood
    | StuckOutput
    | ScriptEdit
    | BitFlip
    | FullDisk
    | FullMemory
    | NoDescriptors
    | ClockJump
)
WORKER_FAULTS = (
    ProcessExit,
    UserException,
    MainThreadHang,
    SlowInput,
    NanGradients,
    SilentCorruption,
    SlowDevice,
)
"""Faults that a worker injects into itself, by an order for a failpoint."""
LAUNCHER_FAULTS = (StuckOutput, ScriptEdit)
"""Faults of what surrounds `launch`."""
LINK_FAULTS = (NetworkPartition, SlowLink, LossyLink)
NETWORK_FAULTS = (*LINK_FAULTS, PairPartition)
STORE_MEMBER_FAULTS = (ProcessKill, ProcessStop, SlowProcess, FullMemory, NoDescriptors, *LINK_FAULTS)
"""Faults of a member of the store. A killed one is started again."""
TEMPORARY_FAULTS = (
    ProcessStop,
    SlowProcess,
    MainThreadHang,
    SlowInput,
    DeviceLoss,
    SlowDevice,
    NetworkPartition,
    PairPartition,
    SlowLink,
    LossyLink,
    Flood,
    StuckOutput,
    FullDisk,
    FullMemory,
    NoDescriptors,
    ClockJump,
)
"""Faults with a duration; their processes may continue as before."""


def is_message_flip(fault: Fault) -> bool:
    """Return whether the fault flips bits of a message, which the sender does itself, at a failpoint."""
    return isinstance(fault, BitFlip) and fault.region == "message"


def fault_kind(fault: Fault) -> str:
    """Return the `kind` of the fault in a manifest."""
    return str(fault.__struct_config__.tag)


def fault_duration_s(fault: Fault) -> float | None:
    """Return the time after which the fault ends by itself; None if the fault does not end by time."""
    return fault.duration_s if isinstance(fault, TEMPORARY_FAULTS) else None
