"""The training state in the memory of hosts, with Reed-Solomon parity on others; loads neither jax nor numpy.

See README.md in this folder.
"""
