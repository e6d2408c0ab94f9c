"""Encoding and decoding of buffers, with the kernels that need no compiler."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.erasure import (
    ErasureCodeError,
    ReedSolomon,
    TooManyErasures,
    decode,
    encode,
)
from resilient_jax.erasure.kernels import NumpyKernel
from resilient_jax.erasure.self_test import make_reference_codec
from tests.jax.erasure.kernels import KERNELS

codes = st.one_of(
    st.builds(ReedSolomon, st.integers(1, 10), st.integers(1, 6)),
    st.integers(1, 254).flatmap(lambda k: st.builds(ReedSolomon, st.just(k), st.integers(1, 255 - k))),
)
lengths = st.one_of(st.integers(0, 70), st.sampled_from([127, 4095, 4097, 65537]))
randoms = st.integers(0, 2**32).map(random.Random)  # megabytes drawn by hypothesis itself would be too many
each_kernel = pytest.mark.parametrize("make_kernel", KERNELS)


def encoded(code, kernel, data):
    parity = [bytearray(len(data[0])) for _ in range(code.m)]
    encode(code, kernel, data, parity)
    return parity


@each_kernel
@given(codes, lengths, randoms)
def test_parity_is_that_of_reedsolo_in_each_column(make_kernel, code, length, random):
    length = min(length, 2**17 // code.n)
    data = [random.randbytes(length) for _ in range(code.k)]
    parity = encoded(code, make_kernel(), data)
    codec = make_reference_codec(code)
    for column in {*range(min(length, 2)), *range(max(0, length - 2), length)}:
        word = codec.encode(bytes(shard[column] for shard in data))
        assert bytes(shard[column] for shard in parity) == word[code.k :]


@each_kernel
@given(codes, lengths, randoms)
def test_any_m_lost_shards_are_decoded(make_kernel, code, length, random):
    kernel = make_kernel()
    length = min(length, 2**17 // code.n)
    data = [random.randbytes(length) for _ in range(code.k)]
    stripe = dict(enumerate([*data, *encoded(code, kernel, data)]))
    lost = random.sample(range(code.n), random.randint(0, min(code.m, 12)))
    decoded = {shard: bytearray(length) for shard in lost}
    read = decode(code, kernel, {i: stripe[i] for i in stripe if i not in lost}, decoded)
    assert decoded == {shard: stripe[shard] for shard in lost}
    assert len(read) == (code.k if lost else 0)


@each_kernel
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 3), (2, 2), (4, 2), (3, 4), (5, 3)])
def test_every_set_of_lost_shards_is_decoded(make_kernel, k, m):
    code, kernel, length = ReedSolomon(k, m), make_kernel(), 37
    data = [bytes((7 * i + j * j) % 256 for j in range(length)) for i in range(k)]
    stripe = dict(enumerate([*data, *encoded(code, kernel, data)]))
    for count in range(m + 1):
        for lost in combinations(stripe, count):
            decoded = {shard: bytearray(length) for shard in lost}
            decode(code, kernel, {i: stripe[i] for i in stripe if i not in lost}, decoded)
            assert decoded == {shard: stripe[shard] for shard in lost}


def test_a_byte_range_of_a_shard_is_decoded_from_that_range_of_the_others():
    code, kernel = ReedSolomon(3, 2), NumpyKernel()
    data = [bytes((i * j) % 256 for j in range(500)) for i in range(1, 4)]
    stripe = [memoryview(shard) for shard in (*data, *encoded(code, kernel, data))]
    part = bytearray(100)
    decode(code, kernel, {i: stripe[i][300:400] for i in (0, 2, 4)}, {1: part})
    assert part == data[1][300:400]


def test_a_missing_first_shard_counts_as_zeros():
    kernel = NumpyKernel()
    data = [b"abc", b"def"]
    assert encoded(ReedSolomon(3, 2), kernel, [bytes(3), *data]) == encoded(ReedSolomon(2, 2), kernel, data)


def test_invalid_stripes_are_refused():
    code, kernel = ReedSolomon(3, 2), NumpyKernel()
    shard, room = bytes(8), [bytearray(8), bytearray(8)]
    with pytest.raises(ErasureCodeError, match="data: found 2 buffers, expected 3"):
        encode(code, kernel, [shard] * 2, room)
    with pytest.raises(ErasureCodeError, match="parity: found 1 buffers, expected 2"):
        encode(code, kernel, [shard] * 3, room[:1])
    with pytest.raises(ErasureCodeError, match=r"shards \[1\]: found both present and wanted"):
        decode(code, kernel, {0: shard, 1: shard, 2: shard}, {1: room[0]})
    with pytest.raises(TooManyErasures, match="3 shards are lost, at most 2 of 5"):
        decode(code, kernel, {0: shard, 4: shard}, {1: room[0]})
