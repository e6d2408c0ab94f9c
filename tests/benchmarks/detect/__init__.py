"""Benchmark of the detector of slow hosts, on simulated jobs."""
