"""Examines a machine before a job runs on it: what is installed and allowed, and what JAX's runtime does when a peer dies.

Only `experiment_process` imports jax, in processes of its own.
"""
