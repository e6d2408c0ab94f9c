"""Settings of gRPC's C library, which reads them from the environment at its first import.

The package imports this module before `grpc`; a value that the user has set is kept.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
"""Failures reach the caller as our errors; the C library would print each of them to stderr, too."""

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
"""We start processes by fork with an immediate exec, which gRPC's fork handlers can only delay or deadlock."""
