"""Formulas of one candidate's numbers, or of columns: arrays with a row for each candidate.

A formula stands once. Its types say `int` and `float`; `candidate_table` calls it with columns, and arithmetic and
comparisons are the same for both. What Python's own functions cannot do with columns is here.
"""

import math
from typing import Any, TypeAlias

import numpy as np

Column: TypeAlias = Any
"""An array that is broadcast to the rows. Of any type, since formulas say `int` and `float`."""


def is_column(number: float) -> bool:
    """Return whether this is a column."""
    return isinstance(number, np.ndarray)


def maximum(first: float, second: float, *others: float) -> float:
    """Return the largest, row by row."""
    larger = np.maximum(first, second) if is_column(first) or is_column(second) else max(first, second)
    return maximum(larger, *others) if others else larger


def minimum(first: float, second: float) -> float:
    """Return the smaller, row by row."""
    return np.minimum(first, second) if is_column(first) or is_column(second) else min(first, second)


def choose(condition: bool, first: float, second: float) -> Column:
    """Return the first where the condition holds, else the second."""
    if is_column(condition):
        return np.where(condition, first, second)
    return first if condition else second


def floor(number: float) -> float:
    """Return the largest whole number that is not larger."""
    return np.floor(number) if is_column(number) else math.floor(number)


def find_common_divisor(first: int, second: int) -> int:
    """Return the greatest common divisor, row by row."""
    return np.gcd(first, second) if is_column(first) or is_column(second) else math.gcd(first, second)


def count_bits(number: int) -> int:
    """Return the binary digits of a number; none of 0."""
    return np.frexp(number)[1] if is_column(number) else number.bit_length()
