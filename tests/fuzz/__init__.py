"""Attacks on the ports of a running job; `python tests/fuzz --help`."""
