"""From a program to what the planner must know of it. May import jax.

See README.md in this folder.
"""
