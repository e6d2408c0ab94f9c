"""The self-test of a kernel: a comparison with reedsolo on this machine, before the kernel encodes any state.

A library built for another processor, or a compiler with a bug, gives wrong parity, which stays unnoticed until a
recovery needs it.
"""

import functools
import random
import time
from dataclasses import dataclass

import reedsolo

from resilient_jax.erasure.errors import KernelSelfTestFailed
from resilient_jax.erasure.galois_field import PRIMITIVE_POLYNOMIAL, multiplication_row
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.reed_solomon import ReedSolomon
from resilient_jax.erasure.shards import decode, encode

SHARD_BYTES = 291
"""Bytes of a shard: several vectors of any processor and a partial one at the end."""
COMPARED_COLUMNS = (*range(8), *range(SHARD_BYTES - 40, SHARD_BYTES))
"""The columns compared with reedsolo, which takes 15 us for each: those at both ends."""
CODES = (ReedSolomon(1, 1), ReedSolomon(4, 2), ReedSolomon(10, 7))
"""One code for each path of the kernels: XOR; few rows; more than the six rows that ISA-L does at once."""


@functools.lru_cache(maxsize=64)
def make_reference_codec(code: ReedSolomon) -> reedsolo.RSCodec:
    """Return reedsolo with the parameters of our code, for one column at a time.

    It is cached, as making it takes longer than using it.

    reedsolo keeps the tables of the field in module globals, which every call sets to those of its codec: a thread
    that uses reedsolo with another field at the same time breaks it.
    """
    # fcr=0 makes g(x) = prod_{i<m} (x - 2^i), as in `reed_solomon`; nsize=n, as a codeword has one byte of each shard.
    return reedsolo.RSCodec(nsym=code.m, nsize=code.n, fcr=0, prim=PRIMITIVE_POLYNOMIAL, generator=2)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The extent of a self-test.

    Attributes:
        duration_s: seconds of the self-test, under 0.05 where the kernel has nothing to compile.
        columns: codewords compared with reedsolo.
    """

    duration_s: float
    columns: int


def run_self_test(kernel: Kernel) -> SelfTest:
    """Compare all products of the field, and parity and worst-case decoding of three codes, with reedsolo.

    Raises:
        KernelSelfTestFailed: a byte differs; the message says where.
    """
    started_s = time.monotonic()
    _compare_products(kernel)
    for code in CODES:
        _compare_code(kernel, code)
    return SelfTest(duration_s=time.monotonic() - started_s, columns=len(CODES) * len(COMPARED_COLUMNS))


def _compare_products(kernel: Kernel) -> None:
    # The 256 x 1 matrix of all factors times the row of all bytes gives all 65,536 products.
    every_byte = bytes(range(256))
    rows = [bytearray(256) for _ in range(256)]
    kernel.apply(tuple(bytes([factor]) for factor in range(256)), [every_byte], rows)
    for factor, row in enumerate(rows):
        if row != multiplication_row(factor):
            raise KernelSelfTestFailed(
                f"{kernel.name} kernel ({kernel.description}): wrong products with {factor}"
            )


def _compare_code(kernel: Kernel, code: ReedSolomon) -> None:
    # Each column is a codeword: reedsolo encodes the k data bytes and appends the m parity bytes.
    source = random.Random(code.n)
    data = [source.randbytes(SHARD_BYTES) for _ in range(code.k)]
    parity = [bytearray(SHARD_BYTES) for _ in range(code.m)]
    encode(code, kernel, data, parity)
    codec = make_reference_codec(code)
    for column in COMPARED_COLUMNS:
        expected = codec.encode(bytes(shard[column] for shard in data))[code.k :]
        found = bytes(shard[column] for shard in parity)
        if found != expected:
            raise KernelSelfTestFailed(
                f"{kernel.name} kernel ({kernel.description}): parity of k = {code.k}, m = {code.m} at byte {column} "
                f"of {SHARD_BYTES}: found {found.hex()}, expected {bytes(expected).hex()} as of reedsolo"
            )
    # Worst case of decoding: as many data shards as possible, at most m, are lost.
    lost = range(min(code.k, code.m))
    stripe: dict[int, bytes | bytearray] = dict(enumerate([*data, *parity]))
    decoded = {shard: bytearray(SHARD_BYTES) for shard in lost}
    decode(code, kernel, {shard: stripe[shard] for shard in stripe if shard not in lost}, decoded)
    if any(decoded[shard] != stripe[shard] for shard in lost):
        raise KernelSelfTestFailed(
            f"{kernel.name} kernel ({kernel.description}): decoding of k = {code.k}, m = {code.m}"
        )
