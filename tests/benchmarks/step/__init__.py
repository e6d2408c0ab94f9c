"""Benchmark of the trainer's step time, and of the work redone after a kill."""
