"""The placement of chunks and parity in any group: each in one place, and no two of a stripe on one member."""

from itertools import combinations

from hypothesis import example, given
from hypothesis import strategies as st

from resilient_jax.snapshot.stripes import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    MIN_BLOCKS_PER_CHUNK,
    cut_grid,
    data_members,
    parity_members,
    stripe_of_chunk,
    stripe_of_row,
)

groups = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n - 1, 6))))


@given(groups)
def test_every_chunk_is_one_data_shard_of_one_stripe(group):
    n, m = group
    chunks = {
        (member, shard): stripe
        for stripe in range(n)
        for shard, member in enumerate(data_members(stripe, n, m))
    }
    expected = {(i, j): stripe_of_chunk(i, j, n, m) for i in range(n) for j in range(n - m)}
    assert chunks == expected


@given(groups)
def test_every_member_keeps_each_row_of_parity_once(group):
    n, m = group
    rows = {
        (member, row): stripe
        for stripe in range(n)
        for row, member in enumerate(parity_members(stripe, n, m))
    }
    assert rows == {(i, p): stripe_of_row(i, p, n, m) for i in range(n) for p in range(m)}


@given(groups)
def test_a_stripe_has_one_shard_on_every_member(group):
    n, m = group
    for stripe in range(n):
        assert sorted(data_members(stripe, n, m) + parity_members(stripe, n, m)) == list(range(n))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_any_m_lost_members_leave_k_shards_of_every_stripe(group):
    n, m = group
    for lost in combinations(range(n), m):
        for stripe in range(n):
            members = data_members(stripe, n, m) + parity_members(stripe, n, m)
            assert sum(member not in lost for member in members) == n - m


def test_the_formulas_agree_with_the_description_of_the_protocol():
    # n = 5, m = 2: stripe 0 has parity on members 0 and 1, then the data shards.
    assert parity_members(0, 5, 2) == (0, 1)
    assert data_members(0, 5, 2) == (2, 3, 4)
    assert parity_members(4, 5, 2) == (4, 0)
    assert data_members(4, 5, 2) == (1, 2, 3)
    # Member i has its chunk j in stripe (i - m - j) mod n, and parity row p of stripe (i - p) mod n.
    assert [stripe_of_chunk(1, chunk, 5, 2) for chunk in range(3)] == [4, 3, 2]
    assert [stripe_of_row(0, row, 5, 2) for row in range(2)] == [0, 4]


@given(st.lists(st.integers(0, 2**40), max_size=8), st.integers(1, 254))
@example([], 3)
@example([0, 0], 1)
@example([3 * MIN_BLOCK_BYTES, 5], 3)
def test_k_chunks_hold_the_longest_part_and_waste_little(parts, k):
    block, chunk = cut_grid(parts, k)
    longest = max(parts, default=0)
    assert MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES
    assert block & (block - 1) == 0
    assert chunk % block == 0
    assert chunk * k >= longest
    assert chunk == 0 or (chunk - block) * k < longest
    assert block == MIN_BLOCK_BYTES or block * MIN_BLOCKS_PER_CHUNK <= chunk
