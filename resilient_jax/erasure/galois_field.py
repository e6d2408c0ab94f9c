"""Arithmetic in GF(2^8), the field of the code: bytes modulo the polynomial 0x11d.

A byte b7 .. b0 is the polynomial b7 x^7 + ... + b0 over GF(2). The sum of two bytes is their XOR; a product is
the product of the polynomials modulo x^8 + x^4 + x^3 + x^2 + 1. Plank, "A tutorial on Reed-Solomon coding for
fault-tolerance in RAID-like systems" (Software: Practice and Experience 27, 1997).

`reedsolo.RSCodec(prim=0x11d, generator=2)` and ISA-L use the same polynomial and generator. Any other choice is
another code, whose parity neither of them can read.
"""

import functools

PRIMITIVE_POLYNOMIAL = 0x11D
"""x^8 + x^4 + x^3 + x^2 + 1. It is primitive: 2 (the polynomial x) generates the multiplicative group."""
GROUP_ORDER = 255
"""The order of the multiplicative group: 2^255 = 1."""


def _compute_powers_of_two() -> tuple[int, ...]:
    powers = [1]
    while len(powers) < GROUP_ORDER:
        # Times x; x^8 = x^4 + x^3 + x^2 + 1 brings the result back below 256.
        doubled = powers[-1] << 1
        powers.append(doubled ^ PRIMITIVE_POLYNOMIAL if doubled > 0xFF else doubled)
    return tuple(powers)


POWERS = _compute_powers_of_two()
"""POWERS[i] = 2^i, for i in range(255)."""
LOGARITHMS = {power: exponent for exponent, power in enumerate(POWERS)}
"""LOGARITHMS[2^i] = i; 0 has no logarithm."""


def multiply(a: int, b: int) -> int:
    """Return the product of two field elements, each in range(256).

    >>> multiply(0x80, 2) == 0x100 ^ PRIMITIVE_POLYNOMIAL
    True
    """
    # a b = 2^(log a + log b), and exponents count modulo the order of the group.
    return POWERS[(LOGARITHMS[a] + LOGARITHMS[b]) % GROUP_ORDER] if a and b else 0


def reciprocal(a: int) -> int:
    """Return the element whose product with `a` is 1; `a` is in range(1, 256)."""
    # 1 / 2^i = 2^-i = 2^(255 - i).
    return POWERS[-LOGARITHMS[a] % GROUP_ORDER]


@functools.cache
def multiplication_row(a: int) -> bytes:
    """Return the products of `a` with 0, 1 .. 255: the table with which `bytes.translate` multiplies a row by `a`."""
    return bytes(multiply(a, b) for b in range(256))
