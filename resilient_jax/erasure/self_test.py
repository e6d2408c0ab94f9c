"""Whether a kernel computes on this machine what reedsolo says, asked before it is trusted with anyone's state.

A library built for another processor, or a compiler with a bug, gives wrong parity that nobody notices until
the day it is needed.
"""

import random
import time
from dataclasses import dataclass

from resilient_jax.erasure.decoding import decode
from resilient_jax.erasure.encoding import encode
from resilient_jax.erasure.errors import KernelWrong
from resilient_jax.erasure.galois_field import products
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.reed_solomon import ReedSolomon
from resilient_jax.erasure.reference_codec import reference_codec

LENGTH = 291
"""Bytes in a shard: several vectors of any processor and a ragged end."""
COMPARED = (*range(8), *range(LENGTH - 40, LENGTH))
"""The columns compared with reedsolo, which takes 15 us for each: both ends."""
CODES = (ReedSolomon(1, 1), ReedSolomon(4, 2), ReedSolomon(10, 7))
"""One of each way that kernels go: XOR; few rows; more than the six rows that ISA-L does at once."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was tested.

    Attributes:
        duration_s: how long it took. Under 0.05 where the kernel has nothing to compile.
        columns: codewords compared with reedsolo.
    """

    duration_s: float
    columns: int


def check_kernel(kernel: Kernel) -> SelfTest:
    """Compares all products of the field, and parity and worst-case decoding of three codes.

    Raises:
        KernelWrong: a byte differs; says where.
    """
    started_s = time.monotonic()
    _compare_products(kernel)
    for code in CODES:
        _compare_code(kernel, code)
    return SelfTest(duration_s=time.monotonic() - started_s, columns=len(CODES) * len(COMPARED))


def _compare_products(kernel: Kernel) -> None:
    every_byte = bytes(range(256))
    rows = [bytearray(256) for _ in range(256)]
    kernel.apply(tuple(bytes([factor]) for factor in range(256)), [every_byte], rows)
    for factor, row in enumerate(rows):
        if row != products(factor):
            raise KernelWrong(f"{kernel.name} kernel ({kernel.description}): wrong products with {factor}")


def _compare_code(kernel: Kernel, code: ReedSolomon) -> None:
    source = random.Random(code.n)
    data = [source.randbytes(LENGTH) for _ in range(code.k)]
    parity = [bytearray(LENGTH) for _ in range(code.m)]
    encode(code, kernel, data, parity)
    codec = reference_codec(code)
    for column in COMPARED:
        expected = codec.encode(bytes(shard[column] for shard in data))[code.k :]
        found = bytes(shard[column] for shard in parity)
        if found != expected:
            raise KernelWrong(
                f"{kernel.name} kernel ({kernel.description}): parity of k = {code.k}, m = {code.m} at byte {column} "
                f"of {LENGTH}: found {found.hex()}, expected {bytes(expected).hex()} as of reedsolo"
            )
    lost = range(min(code.k, code.m))
    stripe: dict[int, bytes | bytearray] = dict(enumerate([*data, *parity]))
    decoded = {shard: bytearray(LENGTH) for shard in lost}
    decode(code, kernel, {shard: stripe[shard] for shard in stripe if shard not in lost}, decoded)
    if any(decoded[shard] != stripe[shard] for shard in lost):
        raise KernelWrong(
            f"{kernel.name} kernel ({kernel.description}): decoding of k = {code.k}, m = {code.m}"
        )
