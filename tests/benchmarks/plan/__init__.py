"""Benchmark of the planner: search time and estimate errors."""
