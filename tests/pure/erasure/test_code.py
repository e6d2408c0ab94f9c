"""The matrices of the code: reedsolo's parity, any k of n shards, invalid arguments, and the public names."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.erasure import ErasureCodeError, ReedSolomon, TooManyErasures
from resilient_jax.erasure.galois_field import multiply, reciprocal
from resilient_jax.erasure.matrix import identity, invert, linear_combination, matmul, unit_vector
from resilient_jax.erasure.self_test import make_reference_codec
from resilient_jax.errors import CallerError

codes = st.integers(1, 254).flatmap(lambda k: st.builds(ReedSolomon, st.just(k), st.integers(1, 255 - k)))
elements = st.integers(0, 255)


@given(elements, elements, elements)
def test_field_arithmetic_obeys_the_field_axioms(a, b, c):
    assert multiply(a, b) == multiply(b, a)
    assert multiply(a, multiply(b, c)) == multiply(multiply(a, b), c)
    assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)
    assert multiply(a, 1) == a
    assert a == 0 or multiply(a, reciprocal(a)) == 1


@given(codes, st.data())
def test_parity_of_a_column_is_that_of_reedsolo(code, data):
    column = data.draw(st.binary(min_size=code.k, max_size=code.k))
    parity = linear_combination(
        column, list(map(bytes, zip(*code.parity_matrix, strict=True))), bytes(code.m)
    )
    assert parity == make_reference_codec(code).encode(column)[code.k :]


@given(codes)
def test_one_parity_shard_has_a_matrix_of_ones_and_missing_data_shards_are_leading_zeros(code):
    assert ReedSolomon(code.k, 1).parity_matrix == (bytes([1]) * code.k,)
    assert len(code.parity_matrix) == code.m
    shorter = ReedSolomon(1, code.m).parity_matrix  # missing data shards count as leading zeros
    assert [row[-1:] for row in code.parity_matrix] == list(shorter)


@pytest.mark.parametrize("m", range(1, 6))
@pytest.mark.parametrize("k", range(1, 7))
def test_any_k_shards_of_a_small_code_give_all_others(k, m):
    code = ReedSolomon(k, m)
    stripe = (*identity(k), *code.parity_matrix)  # shard i as a combination of the data
    for present in combinations(range(code.n), k):
        wanted = tuple(shard for shard in range(code.n) if shard not in present)
        decoding = code.make_decoding(present, wanted)
        assert decoding.sources == present
        assert matmul(decoding.matrix, tuple(stripe[shard] for shard in present)) == tuple(
            stripe[shard] for shard in wanted
        )


@given(codes, st.randoms(use_true_random=False))
def test_any_k_shards_of_any_code_give_the_wanted_ones(code, random):
    column = random.randbytes(code.k)
    word = bytes(make_reference_codec(code).encode(column))
    present = random.sample(range(code.n), code.k)
    absent = sorted(set(range(code.n)).difference(present))
    wanted = random.sample(absent, min(3, len(absent)))
    decoding = code.make_decoding(present, wanted)
    given_bytes = [bytes([word[shard]]) for shard in decoding.sources]
    found = [linear_combination(row, given_bytes, b"\x00") for row in decoding.matrix]
    assert b"".join(found) == bytes(word[shard] for shard in decoding.wanted)


def test_data_shards_are_preferred():
    assert ReedSolomon(3, 3).make_decoding({5, 0, 4, 2}, {1}).sources == (0, 2, 4)


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_an_inverse_undoes_its_matrix(size, random):
    rows = tuple(random.randbytes(size) for _ in range(size))
    try:
        found = invert(rows)
    except ZeroDivisionError:
        return
    assert matmul(found, rows) == matmul(rows, found) == identity(size)


def test_a_singular_matrix_has_no_inverse():
    with pytest.raises(ZeroDivisionError, match="no pivot in column 1 of 2"):
        invert((unit_vector(2, 0), unit_vector(2, 0)))


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 0), (-1, 3), (200, 56), (255, 1), (1, 255)])
def test_an_invalid_k_or_m_is_refused(k, m):
    with pytest.raises(ErasureCodeError, match=f"found k = {k} and m = {m}, expected .* at most 255"):
        ReedSolomon(k, m)


@pytest.mark.parametrize(("k", "m"), [(254, 1), (1, 254), (128, 127)])
def test_255_shards_are_allowed(k, m):
    assert len(ReedSolomon(k, m).parity_matrix) == m


def test_the_error_of_too_many_erasures_names_the_lost_shards():
    with pytest.raises(TooManyErasures, match=r"3 shards are lost, at most 2 of 6.*\[0, 3, 4\].*\[1, 2, 5\]"):
        ReedSolomon(4, 2).make_decoding([1, 2, 5], [0])


@pytest.mark.parametrize("shards", [(0, 1, 6), (-1, 1, 2), (0, 0, 1)])
def test_shards_outside_the_code_are_refused(shards):
    with pytest.raises(ErasureCodeError, match="expected different numbers from 0 to 4"):
        ReedSolomon(3, 2).make_decoding(shards, ())


def test_invalid_input_is_an_error_of_the_caller():
    assert issubclass(ErasureCodeError, CallerError)
    assert issubclass(TooManyErasures, CallerError)
