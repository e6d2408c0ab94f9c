"""The benchmark `snapshot`."""
