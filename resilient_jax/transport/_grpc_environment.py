"""Settings of gRPC's C library, which reads them from the environment when it is first imported.

Imported before `grpc` by the package itself; a value that the user has set is kept.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
"""Failures reach the caller as our errors; the C library would print each once more to stderr."""

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
"""We start processes by fork and exec at once; gRPC's fork handlers can only delay or deadlock that."""
