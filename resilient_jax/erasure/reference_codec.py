"""reedsolo, set to our code: the reference for the self-test, and the decoder of single columns."""

import functools

import reedsolo

from resilient_jax.erasure.galois_field import PRIMITIVE_POLYNOMIAL
from resilient_jax.erasure.reed_solomon import ReedSolomon


@functools.lru_cache(maxsize=64)
def make_reference_codec(code: ReedSolomon) -> reedsolo.RSCodec:
    """Encodes and decodes one column at a time. Kept, because it takes longer to make than to use.

    reedsolo keeps the field's tables in module globals, which every call sets to those of its codec: threads
    that use it with another field at the same time break it.
    """
    return reedsolo.RSCodec(nsym=code.m, nsize=code.n, fcr=0, prim=PRIMITIVE_POLYNOMIAL, generator=2)
