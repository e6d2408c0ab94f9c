"""The memory of messages is reused, without new pages from the kernel for every message."""

import subprocess
import sys

from tests.support.patience import patience

MESSAGES = """
import resource
from resilient_jax.snapshot.malloc_settings import keep_freed_memory
{first}
def use():
    [b"x" * 4 * 2**20 for _ in range(8)]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 8 * 4 * 2**20 // 4096


def faults(first: str) -> int:
    """Return the page faults of 80 messages of 4 MiB, in a process of its own, since the setting is per process."""
    command = [sys.executable, "-c", MESSAGES.format(first=first)]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(6)).stdout
    )


def test_messages_reuse_pages_when_freed_memory_is_kept() -> None:
    assert faults("pass") > PAGES / 4
    assert faults("assert keep_freed_memory()") < PAGES / 100
