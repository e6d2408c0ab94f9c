"""Training that survives: JAX jobs that go on when hosts die."""
