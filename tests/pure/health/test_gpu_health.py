"""What readings and XIDs of GPUs mean, as tables; and what of it is news."""

import msgspec
import pytest

from resilient_jax.cluster.nvml_reader import parse_visible_devices, uses_gpus
from resilient_jax.health.gpu_exclusion import NO_EXCLUSION, RENEWAL_S, SAME_FAULT_S, judge_exclusion
from resilient_jax.health.gpu_health import (
    HOT_BITS,
    THROTTLE_REASONS,
    GpuFinding,
    GpuSeverity,
    describe_throttling,
    judge_reading,
    judge_xid,
    name_hot_reasons,
)
from resilient_jax.health.gpu_monitor import NUM_READINGS, GpuMonitor, ThrottlingBegan, ThrottlingEnded
from resilient_jax.health.gpu_reading import GpuReading, GpuXid

HEALTHY = GpuReading(
    index=3,
    uuid="GPU-5c1e",
    name="NVIDIA H100",
    temperature_c=61,
    clock_mhz=1980,
    max_clock_mhz=1980,
    throttle_bits=0x4,
    uncorrected_ecc=0,
    is_page_pending=False,
    is_remap_pending=False,
    has_remap_failed=False,
)
HOT = msgspec.structs.replace(HEALTHY, throttle_bits=0x44, temperature_c=91, clock_mhz=900)

XIDS = {
    13: GpuSeverity.APPLICATION,
    31: GpuSeverity.APPLICATION,
    43: GpuSeverity.APPLICATION,
    45: GpuSeverity.APPLICATION,
    48: GpuSeverity.FAILED,
    63: GpuSeverity.NOTED,
    64: GpuSeverity.UNFIT,
    74: GpuSeverity.FAILED,
    79: GpuSeverity.FAILED,
    92: GpuSeverity.NOTED,
    94: GpuSeverity.FAILED,
    95: GpuSeverity.FAILED,
    109: GpuSeverity.NOTED,
    119: GpuSeverity.FAILED,
    120: GpuSeverity.FAILED,
    140: GpuSeverity.FAILED,
    145: GpuSeverity.NOTED,
    999: GpuSeverity.NOTED,  # of a driver that is newer than the table
}

READINGS: dict[str, tuple[GpuReading, dict[str, GpuSeverity]]] = {
    "healthy": (HEALTHY, {}),
    "nothing is known": (GpuReading(index=0), {}),
    "hot": (HOT, {}),
    "errors of before, all dealt with": (msgspec.structs.replace(HEALTHY, uncorrected_ecc=7), {}),
    "lost": (
        GpuReading(index=0, problem="GPU is lost"),
        {"unreachable": GpuSeverity.FAILED},
    ),
    "remap failed": (
        msgspec.structs.replace(HEALTHY, has_remap_failed=True),
        {"row remap failure": GpuSeverity.UNFIT},
    ),
    "remap pending": (
        msgspec.structs.replace(HEALTHY, is_remap_pending=True),
        {"row remap pending": GpuSeverity.NOTED},
    ),
    "remap pending after uncorrected errors": (
        msgspec.structs.replace(HEALTHY, is_remap_pending=True, uncorrected_ecc=1),
        {"uncorrected memory error": GpuSeverity.UNFIT},
    ),
    "pages pending": (
        msgspec.structs.replace(HEALTHY, is_page_pending=True),
        {"retired pages pending": GpuSeverity.UNFIT},
    ),
    "two at once": (
        msgspec.structs.replace(HEALTHY, has_remap_failed=True, is_remap_pending=True),
        {"row remap failure": GpuSeverity.UNFIT, "row remap pending": GpuSeverity.NOTED},
    ),
}


@pytest.mark.parametrize("code", XIDS)
def test_an_xid_has_a_severity_and_a_sentence(code: int) -> None:
    finding = judge_xid(GpuXid(index=3, code=code), HEALTHY.label)
    assert (finding.severity, finding.what) == (XIDS[code], f"XID {code}")
    assert finding.why.startswith(f"GPU 3 (GPU-5c1e): the driver reported XID {code}: ")


@pytest.mark.parametrize("case", READINGS)
def test_a_reading_leads_to_findings(case: str) -> None:
    reading, expected = READINGS[case]
    found = judge_reading(reading)
    assert {finding.what: finding.severity for finding in found} == expected
    assert all(finding.why.startswith(f"{reading.label}: ") for finding in found)


def test_only_heat_and_lack_of_power_count_as_throttling() -> None:
    hot = {bit: word for bit, word in THROTTLE_REASONS.items() if name_hot_reasons(bit)}
    assert list(hot.values()) == [
        "hardware slowdown",
        "software thermal slowdown",
        "hardware thermal slowdown",
        "hardware power brake",
    ]
    assert sum(hot) == HOT_BITS
    assert name_hot_reasons(None) == ()
    assert describe_throttling(HOT) == "hardware thermal slowdown, 91 C, 900 of 1980 MHz"
    assert (
        describe_throttling(GpuReading(index=0, throttle_bits=0x88))
        == "hardware slowdown, hardware power brake"
    )


def test_a_finding_is_told_once_and_again_after_it_was_over() -> None:
    monitor = GpuMonitor()
    broken = msgspec.structs.replace(HEALTHY, has_remap_failed=True)
    told = [monitor.observe([reading]) for reading in (broken, broken, HEALTHY, broken)]
    assert [len(changes) for changes in told] == [1, 0, 0, 1]
    assert [finding.what for finding in monitor.unfit] == ["row remap failure"]
    assert monitor.notes == tuple(finding.why for finding in monitor.unfit)


def test_new_memory_errors_are_told_and_those_of_before_the_first_reading_are_not() -> None:
    monitor = GpuMonitor()
    counts = (7, 7, 9, None, 9, 0, 1)  # 0: after a reset
    told = [monitor.observe([msgspec.structs.replace(HEALTHY, uncorrected_ecc=count)]) for count in counts]
    whys = [change.why for changes in told for change in changes if isinstance(change, GpuFinding)]
    assert [len(changes) for changes in told] == [0, 0, 1, 0, 0, 0, 1]
    assert [why.partition(": ")[2] for why in whys] == [
        "uncorrected memory errors since the last reading: 2",
        "uncorrected memory errors since the last reading: 1",
    ]
    assert monitor.unfit == ()  # the readings allow it to train


def test_throttling_is_told_when_it_lasts_and_when_it_is_over_for_as_long() -> None:
    monitor = GpuMonitor()
    short = [monitor.observe([r]) for r in [HOT] * (NUM_READINGS - 1) + [HEALTHY]]
    assert short == [()] * NUM_READINGS
    began = [monitor.observe([HOT]) for _ in range(NUM_READINGS + 2)]
    assert began[NUM_READINGS - 1] == (
        ThrottlingBegan(reading=HOT, why="hardware thermal slowdown, 91 C, 900 of 1980 MHz"),
    )
    assert sum(map(len, began)) == 1
    assert monitor.notes == ("GPU 3 (GPU-5c1e) throttled: hardware thermal slowdown, 91 C, 900 of 1980 MHz",)
    wavering = [monitor.observe([r]) for r in [HEALTHY] * (NUM_READINGS - 1) + [HOT]]
    assert wavering == [()] * NUM_READINGS
    ended = [monitor.observe([HEALTHY]) for _ in range(NUM_READINGS)]
    assert ended[-1] == (ThrottlingEnded(reading=HEALTHY, num_readings=NUM_READINGS + 3),)
    assert sum(map(len, ended)) == 1
    assert monitor.notes == ()


def test_gpus_are_told_apart_and_an_xid_names_its_own() -> None:
    monitor = GpuMonitor()
    other = msgspec.structs.replace(HEALTHY, index=5, uuid="GPU-77")
    missing = [GpuReading(index=-1, uuid=uuid, problem="missing") for uuid in ("7", "8")]
    changes = monitor.observe([HEALTHY, other, *missing])
    assert [change.gpu for change in changes if isinstance(change, GpuFinding)] == ["GPU 7", "GPU 8"]
    lost = GpuReading(index=5, problem="GPU is lost")
    heard = monitor.observe([HEALTHY, lost], [GpuXid(index=5, code=79), GpuXid(index=3, code=31)])
    assert [change.gpu for change in heard if isinstance(change, GpuFinding)] == ["GPU 5 (GPU-77)", "GPU 5"]


LOST = judge_xid(GpuXid(index=3, code=79), HEALTHY.label)
REMAP_FAILED = judge_xid(GpuXid(index=3, code=64), HEALTHY.label)
NOTED = judge_xid(GpuXid(index=3, code=63), HEALTHY.label)
QUARANTINE_S = 600.0


def test_a_failure_excludes_the_host_and_what_follows_closely_belongs_to_it() -> None:
    first = judge_exclusion(NO_EXCLUSION, [NOTED], [], now_s=100.0, quarantine_s=QUARANTINE_S)
    assert first is NO_EXCLUSION
    out = judge_exclusion(NO_EXCLUSION, [REMAP_FAILED], [], now_s=100.0, quarantine_s=QUARANTINE_S)
    assert (out.reason, out.until_s, out.ends_worker) == (REMAP_FAILED.why, 700.0, False)
    worse = judge_exclusion(out, [LOST], [], now_s=105.0, quarantine_s=QUARANTINE_S)
    assert worse == msgspec.structs.replace(out, ends_worker=True)
    assert judge_exclusion(worse, [LOST], [], now_s=110.0, quarantine_s=QUARANTINE_S) is worse


def test_a_later_failure_excludes_again_also_if_a_person_had_ended_the_first() -> None:
    out = judge_exclusion(NO_EXCLUSION, [LOST], [], now_s=100.0, quarantine_s=QUARANTINE_S)
    again = judge_exclusion(out, [LOST], [], now_s=100.0 + SAME_FAULT_S, quarantine_s=QUARANTINE_S)
    assert again is not out
    assert (again.since_s, again.until_s, again.ends_worker) == (130.0, 730.0, True)


def test_an_exclusion_is_renewed_before_its_end_only_while_its_reason_stands() -> None:
    out = judge_exclusion(NO_EXCLUSION, [LOST], [LOST], now_s=0.0, quarantine_s=QUARANTINE_S)
    end_s = QUARANTINE_S - RENEWAL_S
    assert judge_exclusion(out, [], [LOST], now_s=end_s - 0.1, quarantine_s=QUARANTINE_S) is out
    assert judge_exclusion(out, [], [], now_s=end_s, quarantine_s=QUARANTINE_S) is out
    renewed = judge_exclusion(out, [], [LOST], now_s=end_s, quarantine_s=QUARANTINE_S)
    assert (renewed.until_s, renewed.ends_worker) == (end_s + QUARANTINE_S, False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", ()),
        ("0,2", ("0", "2")),
        (" GPU-5c1e , 1 ", ("GPU-5c1e", "1")),
        ("1,-1,0", ("1",)),
        ("-1", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    value: str | None, expected: tuple[str, ...] | None
) -> None:
    assert parse_visible_devices(value) == expected


def test_workers_on_cpu_use_no_gpus_on_any_machine() -> None:
    assert not uses_gpus({"JAX_PLATFORMS": "cpu"})
    assert not uses_gpus({"JAX_PLATFORMS": "tpu,cpu"})
    assert uses_gpus({"JAX_PLATFORMS": "cuda,cpu"})
    assert uses_gpus({"JAX_PLATFORMS": "gpu"})
