"""The cache of compiled programs: compiled ahead of time, and shared between hosts."""
