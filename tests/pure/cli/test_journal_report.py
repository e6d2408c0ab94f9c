"""What the agent that serves the store says when the disk does not take the store's journal."""

from pathlib import Path

import pytest

from resilient_jax.cli.agent import _report_journal
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.telemetry.event_log import EventLog


def test_a_journal_that_cannot_be_written_is_named_with_what_to_do(
    capfd: pytest.CaptureFixture[str],
) -> None:
    log, journal = EventLog(None, "host-a"), Path("runs/lm/store-lm.journal")
    _report_journal(HostName("host-a"), journal, log, "No space left on device")
    _report_journal(HostName("host-a"), journal, log, "")
    unwritten, written = log.recent
    assert (unwritten.kind, written.kind) == (
        EventKind.STORE_JOURNAL_UNWRITTEN,
        EventKind.STORE_JOURNAL_WRITTEN,
    )
    assert unwritten.detail == {"path": str(journal), "why": "No space left on device"}
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith(
        f"[host-a] the store's journal {journal} cannot be written: No space left on device."
    )
    assert "Free space on the disk of runs/lm" in first
    assert second == f"[host-a] the store's journal {journal} is written again"
