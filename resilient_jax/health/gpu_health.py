"""What a reading of a GPU, or an XID of the driver, means for its host: tables, and functions that look them up. Pure.

XIDs are from NVIDIA's "Xid Catalog" (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, for Ampere and newer
GPUs; read in 2026). The rule: what the catalog answers with a reset of the GPU or a restart of the machine takes the
host out. Where we differ from the catalog, or its answer depends on what NVML does not tell, the table says so. None
of it has been seen on a GPU by this project.
"""

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from resilient_jax.health.gpu_reading import GpuReading, GpuXid


class GpuSeverity(enum.IntEnum):
    """How bad a finding about a GPU is."""

    APPLICATION = 0
    """A program was wrong, or was ended: nothing is wrong with the GPU."""
    NOTED = 1
    """Evidence for people; nothing is done."""
    UNFIT = 2
    """Its host must not join; if it trains, it leaves at the next step boundary."""
    FAILED = 3
    """What runs on it is lost or cannot be trusted: as `UNFIT`, and the worker is ended at once."""


class XidMeaning(NamedTuple):
    """What an XID means: its severity, and its name for people."""

    severity: GpuSeverity
    name: str


XIDS: Final[Mapping[int, XidMeaning]] = {
    # The catalog: RESTART_APP or IGNORE, a fault of the program. Kubernetes' GPU drivers ignore these, too.
    13: XidMeaning(GpuSeverity.APPLICATION, "graphics engine exception"),
    31: XidMeaning(GpuSeverity.APPLICATION, "memory page fault"),
    43: XidMeaning(GpuSeverity.APPLICATION, "the GPU stopped processing a program"),
    45: XidMeaning(GpuSeverity.APPLICATION, "a program was cleaned up"),  # each killed worker makes one
    # The catalog: RESET_GPU.
    46: XidMeaning(GpuSeverity.FAILED, "the GPU stopped processing"),
    62: XidMeaning(GpuSeverity.FAILED, "its micro-controller halted"),
    95: XidMeaning(GpuSeverity.FAILED, "uncontained memory error"),
    110: XidMeaning(GpuSeverity.FAILED, "security fault"),
    119: XidMeaning(GpuSeverity.FAILED, "its system processor (GSP) did not answer"),
    120: XidMeaning(GpuSeverity.FAILED, "error of its system processor (GSP)"),
    136: XidMeaning(GpuSeverity.FAILED, "training of a link failed"),
    140: XidMeaning(GpuSeverity.FAILED, "unrecovered memory error"),
    143: XidMeaning(GpuSeverity.FAILED, "initialization failed"),
    158: XidMeaning(GpuSeverity.FAILED, "fatal timeout"),
    # RESET_GPU, but what runs goes on: an error in the spare rows, not in the work.
    64: XidMeaning(GpuSeverity.UNFIT, "a row of its memory could not be replaced"),
    # RESTART_BM, the machine.
    79: XidMeaning(GpuSeverity.FAILED, "it has fallen off the bus"),
    # A workflow, in words: "a GPU reset or node reboot is needed to clear this error". Of 74 the cause may be the GPU
    # or switch at the other end of the link.
    48: XidMeaning(GpuSeverity.FAILED, "uncorrectable (double-bit) memory error"),
    74: XidMeaning(GpuSeverity.FAILED, "NVLink error"),
    # Stricter than the catalog (RESTART_APP, and a reset "when convenient"): the worker is lost in any case, and while
    # its host is out the others train on.
    94: XidMeaning(GpuSeverity.FAILED, "contained memory error"),
    # The catalog: IGNORE, or informational beside another XID.
    63: XidMeaning(GpuSeverity.NOTED, "a row of its memory is to be replaced"),
    92: XidMeaning(GpuSeverity.NOTED, "many corrected memory errors"),
    154: XidMeaning(GpuSeverity.NOTED, "another recovery is needed than before"),
    157: XidMeaning(GpuSeverity.NOTED, "a resource could not be retired"),
    171: XidMeaning(GpuSeverity.NOTED, "uncorrectable memory error (DRAM), beside XID 48"),
    172: XidMeaning(GpuSeverity.NOTED, "uncorrectable memory error (SRAM), beside XID 48"),
    # The catalog: RESET_GPU; Kubernetes' drivers count it as the program's fault. A worker that hangs is found anyway.
    109: XidMeaning(GpuSeverity.NOTED, "a context switch took too long"),
    # What to do depends on a code in the kernel's log, which NVML does not give.
    **{
        code: XidMeaning(GpuSeverity.NOTED, f"NVLink 5: {name} error")
        for code, name in zip(
            range(144, 151), ("SAW", "RLW", "TLW", "TREX", "NVLPW", "NETIR", "MSE"), strict=True
        )
    },
}
UNKNOWN_XID: Final = XidMeaning(GpuSeverity.NOTED, "see NVIDIA's catalog of XIDs")

THROTTLE_REASONS: Final[Mapping[int, str]] = {
    # nvml.h, nvmlClocksEventReasons; the pages of NVML call them throttle reasons, too.
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
HOT_BITS: Final = 0x8 | 0x20 | 0x40 | 0x80
"""Heat, or a power supply that fails. A power cap is how GPUs run under load; the others are settings."""


class GpuFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something about one GPU.

    Attributes:
        index: index of the GPU among those that NVML lists.
        gpu: name of the GPU, for people.
        what: a few words that stay the same while the trouble lasts, such as "XID 79".
        why: a sentence for people.
    """

    index: int
    gpu: str
    severity: GpuSeverity
    what: str
    why: str


def judge_xid(xid: GpuXid, gpu: str) -> GpuFinding:
    """Return what an XID means for the host of this GPU; `gpu` is its label."""
    meaning = XIDS.get(xid.code, UNKNOWN_XID)
    return GpuFinding(
        index=xid.index,
        gpu=gpu,
        severity=meaning.severity,
        what=f"XID {xid.code}",
        why=f"{gpu}: the driver reported XID {xid.code}: {meaning.name}",
    )


def judge_reading(reading: GpuReading) -> tuple[GpuFinding, ...]:
    """Return what is wrong with a GPU, whether it trains or not; nothing if it may train."""
    if reading.problem:
        return (_find(reading, GpuSeverity.FAILED, "unreachable", f"it cannot be used: {reading.problem}"),)
    uncorrected, is_remap_pending = reading.uncorrected_ecc, reading.is_remap_pending
    judged = (
        (
            reading.has_remap_failed,
            GpuSeverity.UNFIT,
            "row remap failure",
            "a row of its memory could not be replaced: the vendor exchanges such GPUs",
        ),
        # GPUs before Ampere contain no memory error: the next program may be given the same page.
        (
            reading.is_page_pending,
            GpuSeverity.UNFIT,
            "retired pages pending",
            "pages of its memory with errors are in use until it is reset",
        ),
        (
            is_remap_pending and uncorrected,
            GpuSeverity.UNFIT,
            "uncorrected memory error",
            f"rows of its memory had {uncorrected} uncorrected errors: only a reset replaces them",
        ),
        # NVML's documentation: "a pending remapping won't affect future work on the GPU".
        (
            is_remap_pending and not uncorrected,
            GpuSeverity.NOTED,
            "row remap pending",
            "a row of its memory is replaced by the next reset; it may train until then",
        ),
    )
    return tuple(_find(reading, severity, name, why) for applies, severity, name, why in judged if applies)


def name_hot_reasons(bits: int | None) -> tuple[str, ...]:
    """Return why a GPU is throttled, in words; nothing if it is not, or not by heat or a lack of power."""
    hot = (bits or 0) & HOT_BITS
    return tuple(word for bit, word in THROTTLE_REASONS.items() if hot & bit)


def describe_throttling(reading: GpuReading) -> str:
    """Return a description such as "hardware thermal slowdown, 91 C, 900 of 1980 MHz"."""
    words = list(name_hot_reasons(reading.throttle_bits))
    if reading.temperature_c is not None:
        words.append(f"{reading.temperature_c} C")
    if reading.clock_mhz is not None and reading.max_clock_mhz is not None:
        words.append(f"{reading.clock_mhz} of {reading.max_clock_mhz} MHz")
    return ", ".join(words)


def _find(reading: GpuReading, severity: GpuSeverity, what: str, why: str) -> GpuFinding:
    return GpuFinding(
        index=reading.index,
        gpu=reading.label,
        severity=severity,
        what=what,
        why=f"{reading.label}: {why}",
    )
