"""Benchmark of what finds slow, hanging and corrupt hosts, on simulated and real jobs."""
