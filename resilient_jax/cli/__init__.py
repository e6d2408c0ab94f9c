"""The command line `resilient-jax`, a module or package for each command."""
