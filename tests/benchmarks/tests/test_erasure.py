"""The figures of the erasure benchmark, computed from known times."""

import pytest

from resilient_jax.erasure import ErasureCodeError
from resilient_jax.errors import CallerError
from tests.benchmarks.erasure.command import erasure
from tests.benchmarks.erasure.figures import (
    BARE_ISAL,
    MEMORY_COPY,
    ErasureRequest,
    ErasureTask,
    ErasureTiming,
    ErasureTimings,
    make_erasure_figures,
    speed_of,
)

BYTES = 8_000_000
WANTED = ErasureRequest(data_shards=8, parity_shards=(2, 1), shard_bytes=1_000_000, skew_bytes=0, rounds=3)


def timed(who: str, task: ErasureTask, *times_s: float, m: int = 2) -> ErasureTiming:
    return ErasureTiming(who=who, task=task, parity_shards=m, data_bytes=BYTES, times_s=list(times_s))


def times_of(*found: ErasureTiming) -> ErasureTimings:
    both = [
        *(
            timed("isal", task, 0.002, 0.001, 0.004, m=m)
            for task in (ErasureTask.ENCODE, ErasureTask.DECODE)
            for m in (2, 1)
        ),
        *(timed(MEMORY_COPY, ErasureTask.COPY, 0.0005, 0.0005, 0.0005, m=m) for m in (2, 1)),
    ]
    return ErasureTimings(processor="P", kernel="isal", versions={}, missing={}, timed=[*both, *found])


def test_speed_is_the_bytes_of_data_over_the_median_time() -> None:
    speed = speed_of(BYTES, [0.004, 0.001, 0.002])
    assert speed.gbps == 4.0
    assert 2.0 < speed.low < 4.0 < speed.high < 8.0


def test_figures_are_for_the_first_m_and_ratios_compare_times_of_the_same_round() -> None:
    bare = [
        timed(BARE_ISAL, ErasureTask.ENCODE, 0.001, 0.001, 0.001),
        timed(BARE_ISAL, ErasureTask.DECODE, 0.002, 0.001, 0.004),
        timed(BARE_ISAL, ErasureTask.ENCODE, 0.002, 0.001, 0.001, m=1),
    ]
    figures = make_erasure_figures(WANTED, times_of(*bare), "M")
    assert (figures.encode_gbps, figures.isal_gbps, figures.copy_limit_gbps) == (4.0, 8.0, 16.0)
    assert (figures.m, figures.k, figures.n) == (2, 8, 3)
    assert figures.encode_of_isal == {"2": 0.5, "1": 1.0}
    assert figures.decode_of_isal == {"2": 1.0}
    assert set(figures.spread) == {"encode_gbps", "decode_gbps", "isal_gbps", "copy_limit_gbps"}
    assert figures.machine == "M, P, one core used"


def test_without_isal_its_speed_and_the_ratios_to_it_are_missing() -> None:
    figures = make_erasure_figures(WANTED, times_of(), "M")
    assert figures.isal_gbps is None
    assert figures.encode_of_isal == {}
    assert "isal_gbps" not in figures.spread


def test_too_many_shards_are_rejected_before_the_benchmark_runs() -> None:
    with pytest.raises(ErasureCodeError, match="k = 250 and m = 6"):
        erasure(data_shards=250, parity_shards=[6])


def test_an_empty_shard_is_rejected_before_the_benchmark_runs() -> None:
    with pytest.raises(CallerError, match=r"found --shard-kib 0, .*; expected 1 KiB or more"):
        erasure(shard_kib=0)


def test_a_single_round_is_rejected_before_the_benchmark_runs_because_it_has_no_spread() -> None:
    with pytest.raises(CallerError, match=r"--rounds 1; expected .* 2 rounds or more"):
        erasure(rounds=1)


def test_a_negative_gap_is_rejected_before_the_benchmark_runs() -> None:
    with pytest.raises(CallerError, match=r"--skew-bytes -1, .*; expected .* no negative gap"):
        erasure(skew_bytes=-1)
