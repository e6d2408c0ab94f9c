"""Benchmark of the erasure code on one core."""
