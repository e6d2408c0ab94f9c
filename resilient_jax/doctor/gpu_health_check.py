"""Whether the GPUs of this machine may train, judged as an agent does before its host joins."""

from collections.abc import Mapping, Sequence

from resilient_jax.cluster.nvml_reader import INSTALL, VISIBLE, NvmlReader
from resilient_jax.doctor.check_result import CheckResult, CheckVerdict
from resilient_jax.doctor.gpu_inventory import GROUP
from resilient_jax.errors import GpusUnreadable
from resilient_jax.health.gpu_health import GpuSeverity, describe_throttling, judge_reading, name_hot_reasons
from resilient_jax.health.gpu_reading import GpuReading

NAME = "health"


def read_gpu_health(environment: Mapping[str, str]) -> tuple[GpuReading, ...] | str:
    """Return a reading of each GPU that workers with this environment see; or why there is none."""
    try:
        reader = NvmlReader(environment.get(VISIBLE))
    except GpusUnreadable as error:
        return str(error)
    try:
        return reader.read()
    finally:
        reader.close()


def check_gpu_health(readings: Sequence[GpuReading] | str) -> CheckResult:
    """Return what the readings of `read_gpu_health` mean for a job."""
    if isinstance(readings, str):
        return CheckResult(
            group=GROUP,
            name=NAME,
            verdict=CheckVerdict.WARNING,
            found=f"not watched by agents: {readings}",
            remedy=f"{INSTALL}: then a GPU that fails takes its host out, with the reason",
        )
    findings = [finding for reading in readings for finding in judge_reading(reading)]
    hot = [f"{r.label}: {describe_throttling(r)}" for r in readings if name_hot_reasons(r.throttle_bits)]
    if any(finding.severity >= GpuSeverity.UNFIT for finding in findings):
        verdict, remedy = (
            CheckVerdict.PROBLEM,
            "reset it (nvidia-smi --gpu-reset), or restart the machine; else exchange it",
        )
    elif findings or hot:
        verdict, remedy = (
            CheckVerdict.WARNING,
            "reset GPUs at the next occasion; look at cooling and power of hot ones",
        )
    else:
        verdict, remedy = CheckVerdict.OK, ""
    temperatures = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    return CheckResult(
        group=GROUP,
        name=NAME,
        verdict=verdict,
        found="; ".join([*(finding.why for finding in findings), *hot])
        or f"{len(readings)} without errors, by NVML",
        remedy=remedy,
        figures={"hottest_c": float(max(temperatures))} if temperatures else {},
    )
