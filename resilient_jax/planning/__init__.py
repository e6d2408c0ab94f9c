"""Which sharding plan is best for the devices at hand: what a program needs, what a plan costs, which one to take.

See README.md in this folder. Loads neither jax nor numpy.
"""
