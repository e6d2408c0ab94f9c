"""Benchmark of the stall after a kill, and of the overhead without one."""
