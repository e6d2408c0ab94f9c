"""Finds what is slow from what steps take: evidence in, findings out, without clock, socket or randomness."""
