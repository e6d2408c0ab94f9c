"""The storage processes of this test, found as an operator would: by their parent and their command."""

import psutil

from resilient_jax.checkpoint.storage_connection import MODULE


def find_newest_storage_process() -> int:
    """Return the id of the storage process that was started last."""
    found = [child for child in psutil.Process().children() if MODULE in child.cmdline()]
    return max(found, key=lambda child: child.create_time()).pid
