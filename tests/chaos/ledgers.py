"""Reads the ledgers of a job's workers, also while they are written."""

from pathlib import Path

import msgspec

from resilient_jax.local_job.log_tail import LogTail
from resilient_jax.protocol.ledger import LedgerEntry


def tail_ledger(directory: Path) -> LogTail[LedgerEntry]:
    """Return a reader of the ledgers of all workers in a folder."""
    return LogTail(directory, "*.jsonl", msgspec.json.Decoder(LedgerEntry))
