"""The code itself: which parity belongs to k data shards, and how any k of the k + m shards give the others.

Reed and Solomon, "Polynomial codes over certain finite fields" (1960), systematic, with generator polynomial
g(x) = prod_{i<m} (x - 2^i). A column, one byte of each shard at the same offset, is a codeword: a polynomial
whose highest coefficient is shard 0 and whose lowest is the last parity shard, and which g divides. So the
parity of the data polynomial d is d(x) x^m mod g(x), a linear map: byte for byte that of
`reedsolo.RSCodec(nsym=m, nsize=k+m, fcr=0, prim=0x11d, generator=2)`.

The code is MDS (any k shards determine the rest) because it is this polynomial code. A Vandermonde matrix under an
identity, as ISA-L's `gf_gen_rs_matrix` makes it, is not: k = 6, m = 5 fails.
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
    """k data shards and m parity shards; shard i is data for i < k, and parity i - k after that.

    Any m shards may be lost. What a shard means depends only on its distance from the end: a stripe with fewer data
    shards is the same code whose missing first shards are zero.

    Attributes:
        k: data shards, at least 1.
        m: parity shards, at least 1; k + m is at most 255.

    Raises:
        ErasureCodeError: a number is out of range.

    >>> ReedSolomon(3, 1).parity_matrix  # one parity shard is the XOR of the data
    (b'\\x01\\x01\\x01',)
    """

    k: int
    m: int

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 1 or self.k + self.m > MAX_SHARDS:
            raise ErasureCodeError(
                f"Reed-Solomon code: found k = {self.k} and m = {self.m}, expected both at least 1 and at most "
                f"{MAX_SHARDS} together; cut the hosts into smaller groups"
            )

    @property
    def n(self) -> int:
        """All shards: k + m."""
        return self.k + self.m

    @property
    def parity_matrix(self) -> Matrix:
        """m x k: parity = parity_matrix data, on each column."""
        return _parity_matrix(self.k, self.m)

    def make_decoding(self, present: Collection[int], wanted: Collection[int]) -> "DecodingMatrix":
        """How shards are computed from others.

        Args:
            present: shards that can be read, at least k of them. Data shards are preferred: those cost nothing
            to combine.
            wanted: shards to compute.

        Raises:
            ErasureCodeError: a shard is not one of the code's.
            TooManyErasures: fewer than k are present.
        """
        return _decoding(self, self._checked(present), self._checked(wanted))

    def check(self, present: Collection[int]) -> "Check":
        """What must be zero if the shards that are present belong together.

        With r = len(present) - k more shards than needed there are r equations. Like the code they are MDS: any r
        columns of the check matrix are independent.

        Raises:
            ErasureCodeError: a shard is not one of the code's, or there is none to spare, so that nothing can be checked.
            TooManyErasures: fewer than k are present.
        """
        shards = self._checked(present)
        if len(shards) == self.k:
            raise ErasureCodeError(
                f"nothing to check: found {self.k} shards, expected at least {self.k + 1}; any {self.k} belong together"
            )
        return _check(self, shards)

    def _checked(self, shards: Collection[int]) -> tuple[int, ...]:
        ordered = tuple(sorted(shards))
        if len(set(ordered)) < len(ordered) or (ordered and not 0 <= ordered[0] <= ordered[-1] < self.n):
            raise ErasureCodeError(
                f"shards: found {ordered}, expected different numbers from 0 to {self.n - 1}"
            )
        return ordered


@dataclass(frozen=True, slots=True)
class DecodingMatrix:
    """wanted = matrix sources, on each column.

    Attributes:
        sources: the k shards to read, ascending.
        wanted: the shards that come out, ascending.
        matrix: len(wanted) x k.
    """

    sources: tuple[int, ...]
    wanted: tuple[int, ...]
    matrix: Matrix


@dataclass(frozen=True, slots=True)
class Check:
    """matrix shards = 0, on each column that is right; what it is instead is the syndrome.

    Attributes:
        shards: the shards to read, ascending.
        matrix: r x len(shards), with r = len(shards) - k.
    """

    shards: tuple[int, ...]
    matrix: Matrix


@functools.lru_cache(maxsize=64)
def _parity_matrix(k: int, m: int) -> Matrix:
    """Column j: the coefficients of x^(m+k-1-j) mod g(x), highest first."""
    generator = _generator(m)
    power = generator  # x^m mod g: x^m = g - (the rest), and minus is plus
    columns = [power]
    for _ in range(k - 1):
        overflow, shifted = power[0], power[1:] + b"\x00"  # times x
        power = add_vectors(shifted, scale_vector(generator, overflow))
        columns.append(power)
    columns.reverse()
    return tuple(bytes(column[row] for column in columns) for row in range(m))


def _generator(m: int) -> bytes:
    """The coefficients of g, highest first, without the leading 1: m bytes."""
    g = b"\x01"
    for i in range(m):
        g = add_vectors(g + b"\x00", b"\x00" + scale_vector(g, POWERS[i]))
    return g[1:]


# Recovery meets few sets of shards, and a repair the same ones again and again.
@functools.lru_cache(maxsize=256)
def _decoding(code: ReedSolomon, present: tuple[int, ...], wanted: tuple[int, ...]) -> DecodingMatrix:
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
    rows = dict(zip(sources, identity(k), strict=True))
    if absent:
        # parity = A_data data + A_absent absent, so absent = A_absent^-1 (A_data data + parity): only the lost
        # part, at most m x m, is inverted.
        a = code.parity_matrix
        known = tuple(
            bytes(a[p][d] for d in data) + unit_vector(len(parity), i) for i, p in enumerate(parity)
        )
        solved = matmul(invert(tuple(bytes(a[p][d] for d in absent) for p in parity)), known)
        rows |= dict(zip(absent, solved, strict=True))
    data_rows = [rows[shard] for shard in range(k)]
    for shard in wanted:
        if shard not in rows:
            rows[shard] = linear_combination(code.parity_matrix[shard - k], data_rows, bytes(k))
    return DecodingMatrix(sources=sources, wanted=wanted, matrix=tuple(rows[shard] for shard in wanted))


@functools.lru_cache(maxsize=64)
def _check(code: ReedSolomon, present: tuple[int, ...]) -> Check:
    spare = present[code.k :]
    decoding = _decoding(code, present, spare)
    rows = (row + unit_vector(len(spare), i) for i, row in enumerate(decoding.matrix))
    return Check(shards=present, matrix=tuple(rows))
