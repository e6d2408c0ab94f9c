"""The benchmark `stall`."""
