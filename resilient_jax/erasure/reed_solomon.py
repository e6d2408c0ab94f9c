"""The Reed-Solomon code: the parity of k data shards, and how any k of the k + m shards give the others.

Reed and Solomon, "Polynomial codes over certain finite fields" (1960), in systematic form, with the generator
polynomial g(x) = prod_{i<m} (x - 2^i). A column, one byte of each shard at the same offset, is a codeword: a
polynomial that g divides, whose highest coefficient is shard 0 and whose lowest is the last parity shard. So the
parity of the data polynomial d is d(x) x^m mod g(x). That map is linear and byte for byte that of
`reedsolo.RSCodec(nsym=m, nsize=k+m, fcr=0, prim=0x11d, generator=2)`.

The code is MDS (maximum distance separable: any k shards determine the rest) because it is this polynomial code.
A Vandermonde matrix under an identity, as ISA-L's `gf_gen_rs_matrix` makes it, is not MDS: k = 6, m = 5 fails.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass

from resilient_jax.erasure.errors import ErasureCodeError, TooManyErasures
from resilient_jax.erasure.galois_field import GROUP_ORDER, POWERS
from resilient_jax.erasure.matrix import (
    Matrix,
    add_vectors,
    identity,
    invert,
    linear_combination,
    matmul,
    scale_vector,
    unit_vector,
)

MAX_SHARDS = GROUP_ORDER
"""A codeword has at most one byte for each power of 2 in the field."""


@dataclass(frozen=True, slots=True)
class ReedSolomon:
    """A code with k data shards and m parity shards: shard i is data for i < k, and parity i - k from there on.

    Any m shards may be lost. The meaning of a shard depends only on its distance from the end: a stripe with fewer
    data shards is the same code whose missing first shards are zero.

    Attributes:
        k: data shards, at least 1.
        m: parity shards, at least 1; k + m is at most 255.

    Raises:
        ErasureCodeError: k or m is out of range.

    >>> ReedSolomon(3, 1).parity_matrix  # one parity shard is the XOR of the data
    (b'\\x01\\x01\\x01',)
    """

    k: int
    m: int

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 1 or self.k + self.m > MAX_SHARDS:
            raise ErasureCodeError(
                f"Reed-Solomon code: found k = {self.k} and m = {self.m}, expected both at least 1 and at most "
                f"{MAX_SHARDS} together; split the hosts into smaller groups"
            )

    @property
    def n(self) -> int:
        """The number of all shards, k + m."""
        return self.k + self.m

    @property
    def parity_matrix(self) -> Matrix:
        """The m x k matrix with parity = parity_matrix data, on each column."""
        return _compute_parity_matrix(self.k, self.m)

    def make_decoding(self, present: Collection[int], wanted: Collection[int]) -> "DecodingMatrix":
        """Return the matrix that computes shards from other shards.

        Args:
            present: shards that can be read, at least k. Data shards are preferred: they need no arithmetic.

        Raises:
            ErasureCodeError: the code has no such shard.
            TooManyErasures: fewer than k shards are present.
        """
        return _compute_decoding(self, self._check_shards(present), self._check_shards(wanted))

    def _check_shards(self, shards: Collection[int]) -> tuple[int, ...]:
        ordered = tuple(sorted(shards))
        if len(set(ordered)) < len(ordered) or (ordered and not 0 <= ordered[0] <= ordered[-1] < self.n):
            raise ErasureCodeError(
                f"shards: found {ordered}, expected different numbers from 0 to {self.n - 1}"
            )
        return ordered


@dataclass(frozen=True, slots=True)
class DecodingMatrix:
    """The equation wanted = matrix sources, which holds for each column.

    Attributes:
        sources: the k shards to read, ascending.
        wanted: the shards that the product gives, ascending.
        matrix: len(wanted) x k.
    """

    sources: tuple[int, ...]
    wanted: tuple[int, ...]
    matrix: Matrix


@functools.lru_cache(maxsize=64)
def _compute_parity_matrix(k: int, m: int) -> Matrix:
    """Return the m x k matrix whose column j has the coefficients of x^(m+k-1-j) mod g(x), highest first."""
    generator = _compute_generator(m)
    # g = x^m + r, so x^m mod g = -r, and in this field -r = r: the coefficients without the leading 1.
    power = generator
    columns = [power]
    for _ in range(k - 1):
        # x^(i+1) mod g = x (x^i mod g) mod g: shift by one, then replace the overflow c x^m by c r.
        overflow, shifted = power[0], power[1:] + b"\x00"
        power = add_vectors(shifted, scale_vector(generator, overflow))
        columns.append(power)
    columns.reverse()
    return tuple(bytes(column[row] for column in columns) for row in range(m))


def _compute_generator(m: int) -> bytes:
    """Return the m coefficients of g(x) = prod_{i<m} (x - 2^i), highest first, without the leading 1."""
    g = b"\x01"
    for i in range(m):
        # (x - 2^i) g = x g + 2^i g: appending a zero multiplies by x.
        g = add_vectors(g + b"\x00", b"\x00" + scale_vector(g, POWERS[i]))
    return g[1:]


# A recovery asks for few sets of shards, and for each of them once per chunk of bytes.
@functools.lru_cache(maxsize=256)
def _compute_decoding(code: ReedSolomon, present: tuple[int, ...], wanted: tuple[int, ...]) -> DecodingMatrix:
    k = code.k
    if len(present) < k:
        lost = sorted(set(range(code.n)).difference(present))
        raise TooManyErasures(
            f"{len(lost)} shards are lost, at most {code.m} of {code.n} can be computed from the others: "
            f"lost {lost}, present {list(present)}"
        )
    sources = present[:k]
    data = [shard for shard in sources if shard < k]
    parity = [shard - k for shard in sources if shard >= k]
    absent = [shard for shard in range(k) if shard not in set(data)]
    # rows[i]: shard i as a combination of the sources. A source is itself.
    rows = dict(zip(sources, identity(k), strict=True))
    if absent:
        # Split the columns of the parity matrix A by the data that is present and absent:
        #     parity = A_data data + A_absent absent
        #     absent = A_absent^-1 (A_data data + parity)
        # Only A_absent, at most m x m, is inverted; it is regular because the code is MDS.
        a = code.parity_matrix
        known = tuple(
            bytes(a[p][d] for d in data) + unit_vector(len(parity), i) for i, p in enumerate(parity)
        )
        solved = matmul(invert(tuple(bytes(a[p][d] for d in absent) for p in parity)), known)
        rows |= dict(zip(absent, solved, strict=True))
    data_rows = [rows[shard] for shard in range(k)]
    for shard in wanted:
        # A lost parity shard is its row of A applied to the data, which by now is a combination of the sources.
        if shard not in rows:
            rows[shard] = linear_combination(code.parity_matrix[shard - k], data_rows, bytes(k))
    return DecodingMatrix(sources=sources, wanted=wanted, matrix=tuple(rows[shard] for shard in wanted))
