"""The benchmark `plan`."""
