"""The demo's table of recoveries."""

import io

import pytest
from rich.console import Console

from resilient_jax.cli.demo import FILE_WIDTH
from resilient_jax.cli.demo.results import tabulate_recoveries
from resilient_jax.cli.demo.scenarios import Recovery
from resilient_jax.events import EventKind
from resilient_jax.telemetry.stall import FAULT_EVENTS, Stall


def make_recovery(detected_by: EventKind, restored_bytes: int) -> Recovery:
    stall = Stall(
        detected_by=detected_by,
        change="shrink",
        generation=2,
        num_hosts=3,
        step=7,
        detection_s=12.345,
        quiesce_s=12.345,
        rebuild_s=12.345,
        step_s=12.345,
    )
    return Recovery(
        fault="two hosts at once, with their memory",
        stall=stall,
        steps_lost=1,
        decoded_bytes=restored_bytes,
        snapshot_bytes=0,
        restore_s=0.5,
        devices_per_host=2,
    )


@pytest.mark.parametrize("restored_bytes", [0, 12_345 * 2**20])
def test_the_table_shows_every_figure_in_100_columns(restored_bytes: int) -> None:
    output = io.StringIO()
    recoveries = [make_recovery(kind, restored_bytes) for kind in sorted(FAULT_EVENTS)]
    Console(width=FILE_WIDTH, file=output).print(tabulate_recoveries(recoveries))
    text = output.getvalue()
    assert "\u2026" not in text, f"a shortened word in\n{text}"
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("12345") == (5 if restored_bytes else 4) * len(recoveries)
    assert text.count("49380") == len(recoveries), "the whole stall is the sum of its phases"
    assert text.count("6 of 8") == len(recoveries)
    assert ("restored" in text) == bool(restored_bytes)
