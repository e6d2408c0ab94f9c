"""Benchmark of training under failures, against restarts from Orbax checkpoints."""
