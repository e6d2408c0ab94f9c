"""Events on disk: the log of a host, and stalls read from it."""
