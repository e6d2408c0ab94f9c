"""reedsolo with the parameters of our code: the reference of the self-test and of the tests."""

import functools

import reedsolo

from resilient_jax.erasure.galois_field import PRIMITIVE_POLYNOMIAL
from resilient_jax.erasure.reed_solomon import ReedSolomon


@functools.lru_cache(maxsize=64)
def make_reference_codec(code: ReedSolomon) -> reedsolo.RSCodec:
    """Return a codec that encodes and decodes one column at a time; cached, as making it takes longer than using it.

    reedsolo keeps the tables of the field in module globals, which every call sets to those of its codec: a thread
    that uses reedsolo with another field at the same time breaks it.
    """
    # fcr=0 makes g(x) = prod_{i<m} (x - 2^i), as in `reed_solomon`; nsize=n, as a codeword has one byte of each shard.
    return reedsolo.RSCodec(nsym=code.m, nsize=code.n, fcr=0, prim=PRIMITIVE_POLYNOMIAL, generator=2)
