"""The benchmark `step`."""
