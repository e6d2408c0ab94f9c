"""The field GF(2^8) of the code: bytes, added by XOR, multiplied as polynomials modulo 0x11d.

2 generates the field: every byte but 0 is a power of it, so a product is a sum of logarithms. The modulus and the
generator are those of `reedsolo.RSCodec(prim=0x11d, generator=2)` and of ISA-L; another choice is another code, whose
parity nobody else can read.
"""

import functools

PRIMITIVE_POLYNOMIAL = 0x11D
"""x^8 + x^4 + x^3 + x^2 + 1, primitive."""
GROUP_ORDER = 255
"""Of the multiplicative group: 2^255 = 1."""


def _powers_of_two() -> tuple[int, ...]:
    powers = [1]
    while len(powers) < GROUP_ORDER:
        doubled = powers[-1] << 1
        powers.append(doubled ^ PRIMITIVE_POLYNOMIAL if doubled > 0xFF else doubled)
    return tuple(powers)


POWERS = _powers_of_two()
"""POWERS[i] = 2^i, for i in range(255)."""
LOGARITHMS = {power: exponent for exponent, power in enumerate(POWERS)}
"""LOGARITHMS[2^i] = i; 0 has none."""


def multiply(a: int, b: int) -> int:
    """The product of two elements, each in range(256).

    >>> multiply(0x80, 2) == 0x100 ^ MODULUS
    True
    """
    return POWERS[(LOGARITHMS[a] + LOGARITHMS[b]) % GROUP_ORDER] if a and b else 0


def reciprocal(a: int) -> int:
    """The element whose product with `a` is 1; `a` in range(1, 256)."""
    return POWERS[-LOGARITHMS[a] % GROUP_ORDER]


@functools.cache
def multiplication_row(a: int) -> bytes:
    """The products of `a` with 0, 1 .. 255: a table for `bytes.translate`, which multiplies a whole row by `a`."""
    return bytes(multiply(a, b) for b in range(256))
