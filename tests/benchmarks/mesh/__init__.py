"""Benchmark of replicas over hosts with the state in shards: what the death of a host costs, and no death."""
