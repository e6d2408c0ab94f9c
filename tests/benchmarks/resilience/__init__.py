"""The benchmark `resilience`."""
