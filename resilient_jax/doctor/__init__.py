"""Examines a machine before a job runs on it: what is installed, what is allowed, and what happens when a peer dies.

Only `experiment_process` imports jax, in processes of its own.
"""
