"""Chaos campaigns: they inject the faults of a manifest into a job on this machine, and check the job's invariants."""
