"""Benchmark of taking and restoring snapshots."""
