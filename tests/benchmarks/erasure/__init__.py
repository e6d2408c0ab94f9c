"""The benchmark `erasure`."""
