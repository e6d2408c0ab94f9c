"""The command line `resilient-jax`."""
