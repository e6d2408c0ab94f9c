"""The decide benchmark: see `command`."""
