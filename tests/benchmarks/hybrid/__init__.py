"""Benchmark of a model that is split over hosts: what the death of a stage costs, and its return."""
