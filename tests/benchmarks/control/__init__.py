"""Benchmark of the control plane with up to thousands of hosts."""
