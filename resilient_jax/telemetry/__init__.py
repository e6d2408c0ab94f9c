"""Events on disk: the log of a host, and stalls computed from it."""
