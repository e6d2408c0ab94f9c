"""Programs of plans: compiled, ahead of time, and kept. May import jax.

See README.md in this folder.
"""
