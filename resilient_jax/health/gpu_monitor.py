"""The GPUs of a host over time: readings and XIDs in, changes out. Pure.

A finding is told once, when it begins. Throttling is told when it has lasted for `NUM_READINGS` readings, and when it
has been over for as many: a GPU near its limit throttles now and then, which is no news.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from resilient_jax.health.gpu_health import (
    GpuFinding,
    GpuSeverity,
    describe_throttling,
    judge_reading,
    judge_xid,
    name_hot_reasons,
)
from resilient_jax.health.gpu_reading import GpuReading, GpuXid

NUM_READINGS: Final = 3
"""Readings in a row that begin or end throttling: 15 s at the interval at which an agent reads."""


class ThrottlingBegan(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU is throttled by heat or a lack of power: its last reading, and why in words."""

    reading: GpuReading
    why: str


class ThrottlingEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that was throttled has its clocks again; `num_readings` said that it had not."""

    reading: GpuReading
    num_readings: int


GpuChange = GpuFinding | ThrottlingBegan | ThrottlingEnded


@dataclasses.dataclass(slots=True)
class _Watched:
    """What is remembered of one GPU.

    Attributes:
        label: name of the GPU, for people; kept from before the GPU was lost.
        uncorrected_ecc: errors that are known; those of before the first reading count as known.
        num_hot: readings in a row that were hot.
        num_cool: readings in a row that were not.
        num_throttled: hot readings since the GPU was reported as throttled; 0: the GPU is not.
    """

    label: str
    uncorrected_ecc: int | None = None
    findings: tuple[GpuFinding, ...] = ()
    num_hot: int = 0
    num_cool: int = 0
    num_throttled: int = 0
    throttling: str = ""


class GpuMonitor:
    """Watches all GPUs of a host."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[int, str], _Watched] = {}
        """By index, and for GPUs that NVML does not list by their name in CUDA_VISIBLE_DEVICES."""

    @property
    def unfit(self) -> tuple[GpuFinding, ...]:
        """What the last readings had of GPUs that must not train."""
        return tuple(
            finding
            for watched in self._gpus.values()
            for finding in watched.findings
            if finding.severity >= GpuSeverity.UNFIT
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be seen beside the host: what is wrong with a GPU now, and which are throttled."""
        wrong = tuple(finding.why for watched in self._gpus.values() for finding in watched.findings)
        return wrong + tuple(
            f"{watched.label} throttled: {watched.throttling}"
            for watched in self._gpus.values()
            if watched.num_throttled
        )

    def observe(self, readings: Sequence[GpuReading], xids: Iterable[GpuXid] = ()) -> tuple[GpuChange, ...]:
        """Return what is new. `readings` may be empty, where only XIDs came."""
        changes: list[GpuChange] = []
        for xid in xids:
            finding = judge_xid(xid, self._find_label(xid.index))
            if finding.severity > GpuSeverity.APPLICATION:
                changes.append(finding)
        for reading in readings:
            key = (reading.index, reading.uuid if reading.index < 0 else "")
            watched = self._gpus.setdefault(key, _Watched(reading.label))
            if reading.uuid:
                watched.label = reading.label
            changes += _judge_findings(watched, reading)
            changes += _judge_errors(watched, reading)
            changes += _judge_throttling(watched, reading)
        return tuple(changes)

    def _find_label(self, index: int) -> str:
        watched = self._gpus.get((index, ""))
        return watched.label if watched is not None else f"GPU {index}"


def _judge_findings(watched: _Watched, reading: GpuReading) -> list[GpuChange]:
    known = {finding.what for finding in watched.findings}
    watched.findings = judge_reading(reading)
    return [finding for finding in watched.findings if finding.what not in known]


def _judge_errors(watched: _Watched, reading: GpuReading) -> list[GpuChange]:
    before, now = watched.uncorrected_ecc, reading.uncorrected_ecc
    if now is None:
        return []
    watched.uncorrected_ecc = now  # also when it is less: a reset begins at 0
    if before is None or now <= before:
        return []
    return [
        GpuFinding(
            index=reading.index,
            gpu=watched.label,
            severity=GpuSeverity.FAILED,
            what="uncorrected memory error",
            why=f"{watched.label}: uncorrected memory errors since the last reading: {now - before}",
        )
    ]


def _judge_throttling(watched: _Watched, reading: GpuReading) -> list[GpuChange]:
    if reading.throttle_bits is None:
        return []
    if name_hot_reasons(reading.throttle_bits):
        watched.num_hot, watched.num_cool = watched.num_hot + 1, 0
        watched.throttling = describe_throttling(reading)
        if watched.num_throttled:
            watched.num_throttled += 1
        elif watched.num_hot >= NUM_READINGS:
            watched.num_throttled = watched.num_hot
            return [ThrottlingBegan(reading=reading, why=watched.throttling)]
        return []
    watched.num_hot, watched.num_cool = 0, watched.num_cool + 1
    if watched.num_throttled and watched.num_cool >= NUM_READINGS:
        num_readings, watched.num_throttled = watched.num_throttled, 0
        return [ThrottlingEnded(reading=reading, num_readings=num_readings)]
    return []
