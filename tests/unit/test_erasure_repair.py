"""Dirty columns, errors at unknown positions, and the checksum that has the last word."""

import zlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import needs_isal

from resilient_jax.erasure import (
    ChecksumName,
    ErasureCodeError,
    KernelUnavailable,
    NotRepaired,
    ReedSolomon,
    TooManyErasures,
    choose_checksum,
    encode,
    locate,
    repair,
    scan,
    verify_against,
)
from resilient_jax.erasure.kernels import NumpyKernel
from resilient_jax.erasure.matrix import Span, linear_combination, transpose

KERNEL = NumpyKernel()
CRC32 = choose_checksum(ChecksumName.CRC32)
randoms = st.randoms(use_true_random=False)
codes = st.builds(ReedSolomon, st.integers(1, 12), st.integers(2, 8))


def make_stripe(code, length, random):
    """Shards by index, with the `Verify` that knows them."""
    data = [bytearray(random.randbytes(length)) for _ in range(code.k)]
    parity = [bytearray(length) for _ in range(code.m)]
    encode(code, KERNEL, data, parity)
    stripe = dict(enumerate([*data, *parity]))
    return stripe, verify_against(CRC32, {i: zlib.crc32(shard) for i, shard in stripe.items()})


def copy_of(stripe):
    return {i: bytearray(shard) for i, shard in stripe.items()}


def garble(shard, start, stop, random):
    """Another byte at each offset."""
    for offset in range(start, stop):
        shard[offset] ^= random.randint(1, 255)


@settings(deadline=None, max_examples=25)
@given(codes, st.integers(1, 150), st.integers(10, 100), randoms)
def test_a_scan_finds_exactly_the_columns_that_are_wrong(code, length, block_bytes, random):
    stripe, _ = make_stripe(code, length, random)
    assert list(scan(code, KERNEL, stripe, block_bytes=block_bytes)) == []
    columns = sorted(random.sample(range(length), random.randint(1, length)))
    for column in columns:
        for shard in random.sample(sorted(stripe), random.randint(1, code.m)):
            stripe[shard][column] ^= random.randint(1, 255)
    blocks = list(scan(code, KERNEL, stripe, block_bytes=block_bytes))
    assert [column for block in blocks for column in block.columns()] == columns
    for block in blocks:
        dirty, some = list(block.columns()), block.sample(5)
        assert set(some) <= set(dirty)
        assert (some[0], some[-1]) == (dirty[0], dirty[-1])
        assert len(some) <= 6


@settings(deadline=None, max_examples=25)
@given(codes, st.integers(1, 200), randoms)
def test_errors_in_up_to_half_of_the_parity_are_repaired_column_by_column(code, length, random):
    stripe, verify = make_stripe(code, length, random)
    right = copy_of(stripe)
    absent = random.sample(range(code.n), random.randint(0, code.m - 2))
    for shard in absent:
        del stripe[shard], right[shard]
    for column in random.sample(range(length), random.randint(0, min(10, length))):
        for shard in random.sample(sorted(stripe), random.randint(1, (code.m - len(absent)) // 2)):
            stripe[shard][column] ^= random.randint(1, 255)
    repair(code, KERNEL, stripe, verify)
    assert stripe == right


@settings(deadline=None, max_examples=25)
@given(codes, randoms)
def test_up_to_all_but_one_of_the_parity_is_repaired_where_whole_shards_are_wrong(code, random):
    stripe, verify = make_stripe(code, 400, random)
    right = copy_of(stripe)
    absent = random.sample(range(code.n), random.randint(0, code.m - 2))
    for shard in absent:
        del stripe[shard], right[shard]
    wrong = random.sample(sorted(stripe), random.randint(1, code.m - len(absent) - 1))
    for shard in wrong:
        garble(stripe[shard], 100, 350, random)
    patches = repair(code, KERNEL, stripe, verify)
    assert stripe == right
    assert {patch.shard for patch in patches} == set(wrong)


def test_different_shards_wrong_in_different_places_are_repaired():
    random = Random(1)
    code = ReedSolomon(6, 2)
    stripe, verify = make_stripe(code, 5000, random)
    right = copy_of(stripe)
    for shard, start, stop in ((0, 10, 60), (7, 60, 61), (3, 2000, 4000), (5, 4999, 5000)):
        garble(stripe[shard], start, stop, random)
    patches = repair(code, KERNEL, stripe, verify)
    assert stripe == right
    assert {patch.shard for patch in patches} == {0, 3, 5, 7}


def test_columns_that_fit_three_shards_by_accident_are_repaired_each_by_itself():
    """Two columns blame 1, 3 and 5 together; the third is wrong elsewhere, and has a syndrome that those could make."""
    code = ReedSolomon(8, 4)
    stripe, verify = make_stripe(code, 50, Random(1))
    right = copy_of(stripe)
    at = dict(enumerate(transpose(code.check(stripe).matrix)))
    blamed = Span()
    for shard in (1, 3, 5):
        blamed.put(at[shard])
    error = next(
        e for e in range(1, 256) if blamed.contains(linear_combination([1, e], [at[8], at[11]], bytes(4)))
    )
    for column, errors in {10: {1: 7, 3: 9}, 20: {8: 1, 11: error}, 30: {1: 5, 5: 2}}.items():
        for shard, value in errors.items():
            stripe[shard][column] ^= value
    repair(code, KERNEL, stripe, verify)
    assert stripe == right


def test_a_right_stripe_is_left_alone():
    stripe, verify = make_stripe(ReedSolomon(3, 2), 100, Random(1))
    assert repair(ReedSolomon(3, 2), KERNEL, stripe, verify) == ()


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 60), st.integers(2, 4), randoms)
def test_more_errors_than_parity_tells_are_never_taken_for_repaired(k, m, random):
    """Two wrong bytes at m = 2 lead to a wrong codeword up to one time in four; the checksum does not accept it."""
    code = ReedSolomon(k, m)
    stripe, verify = make_stripe(code, 20, random)
    for shard in random.sample(range(code.n), m):
        stripe[shard][7] ^= random.randint(1, 255)
    damaged = copy_of(stripe)
    with pytest.raises(NotRepaired):
        repair(code, KERNEL, stripe, verify)
    assert stripe == damaged


def test_errors_that_make_another_codeword_fail_the_checksum():
    """The stripe shows nothing then: that is why the caller is asked about each shard."""
    random = Random(1)
    code = ReedSolomon(2, 2)
    _, verify = make_stripe(code, 50, random)
    other, _ = make_stripe(code, 50, random)
    with pytest.raises(NotRepaired, match=r"shards \[0, 1, 2, 3\] fail their checksum after 0 corrections"):
        repair(code, KERNEL, other, verify)


def test_one_parity_shard_only_detects():
    code = ReedSolomon(3, 1)
    stripe, verify = make_stripe(code, 50, Random(1))
    stripe[1][20] ^= 1
    assert [list(block.columns()) for block in scan(code, KERNEL, stripe)] == [[20]]
    with pytest.raises(NotRepaired, match="byte 20 of the shards: errors in more than 0 of 4"):
        repair(code, KERNEL, stripe, verify)


def test_a_checksum_that_fails_to_compute_leaves_the_stripe_as_it_was():
    code = ReedSolomon(3, 2)
    stripe, _ = make_stripe(code, 50, Random(1))
    stripe[1][20] ^= 1
    damaged = copy_of(stripe)
    with pytest.raises(ErasureCodeError, match=r"no digest for shard 0, expected one for each; found \[4\]"):
        repair(code, KERNEL, stripe, verify_against(CRC32, {4: 0}))
    assert stripe == damaged


def test_locating_changes_nothing_and_reads_read_only_shards():
    code = ReedSolomon(3, 2)
    stripe, _ = make_stripe(code, 50, Random(1))
    right = stripe[1][20]
    stripe[1][20] ^= 1
    (patch,) = locate(code, KERNEL, {i: bytes(shard) for i, shard in stripe.items()})
    assert (patch.shard, patch.start, patch.data) == (1, 20, bytes([right]))


def test_too_many_columns_with_errors_of_their_own_are_given_up(monkeypatch):
    monkeypatch.setattr("resilient_jax.erasure.repairing.MAX_SINGLE_COLUMNS", 3)
    random = Random(1)
    code = ReedSolomon(4, 4)
    stripe, verify = make_stripe(code, 50, random)
    for column in range(0, 50, 10):
        for shard in random.sample(range(8), 2):
            stripe[shard][column] ^= 1
    with pytest.raises(NotRepaired, match="more than 3 columns have errors of their own"):
        repair(code, KERNEL, stripe, verify)


def test_bad_stripes_are_refused():
    code = ReedSolomon(3, 2)
    stripe, verify = make_stripe(code, 50, Random(1))
    with pytest.raises(ErasureCodeError, match="nothing to check"):
        repair(code, KERNEL, {i: stripe[i] for i in range(3)}, verify)
    with pytest.raises(TooManyErasures):
        repair(code, KERNEL, {i: stripe[i] for i in range(2)}, verify)
    with pytest.raises(ErasureCodeError, match="shard 0: found read-only memory"):
        repair(code, KERNEL, stripe | {0: bytes(50)}, verify)
    with pytest.raises(ErasureCodeError, match="unequal length"):
        list(scan(code, KERNEL, stripe | {0: bytes(49)}))


def test_empty_shards_are_right():
    code = ReedSolomon(3, 2)
    stripe, verify = make_stripe(code, 0, Random(1))
    assert repair(code, KERNEL, stripe, verify) == ()


CHECK_INPUT = b"123456789"
CASTAGNOLI = 0xE3069283
"""CRC32C of the check input, as in the catalogue of parametrised CRC algorithms (CRC-32/ISCSI)."""


@needs_isal
def test_crc32c_of_isal_is_the_standard_one():
    chosen = choose_checksum()
    assert (chosen.name, chosen.compute(CHECK_INPUT), chosen.compute(b"")) == ("crc32c", CASTAGNOLI, 0)
    assert "libisal" in chosen.library
    long = bytes(range(256)) * 100
    assert chosen.compute(memoryview(long)[3:]) == choose_checksum(ChecksumName.CRC32C).compute(long[3:])


@pytest.fixture
def no_isal(monkeypatch):
    def missing():
        raise KernelUnavailable("ISA-L is not on this machine")

    monkeypatch.setattr("resilient_jax.erasure.checksum.load_isal", missing)


@pytest.mark.usefixtures("no_isal")
def test_crc32c_of_google_is_the_same():
    pytest.importorskip("google_crc32c")
    chosen = choose_checksum()
    assert (chosen.name, chosen.library) == ("crc32c", "google-crc32c")
    assert chosen.compute(bytearray(CHECK_INPUT)) == CASTAGNOLI


@pytest.mark.usefixtures("no_isal")
def test_without_a_library_for_crc32c_it_is_crc32_and_says_so(monkeypatch):
    monkeypatch.setattr("resilient_jax.erasure.checksum.google_crc32c", None)
    chosen = choose_checksum()
    assert (chosen.name, chosen.library, chosen.compute(CHECK_INPUT)) == (
        "crc32",
        "zlib",
        zlib.crc32(CHECK_INPUT),
    )
    with pytest.raises(KernelUnavailable, match="no library for CRC32C"):
        choose_checksum(ChecksumName.CRC32C)
