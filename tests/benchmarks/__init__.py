"""Benchmarks: each prints tables for people and one line of JSON for machines."""
