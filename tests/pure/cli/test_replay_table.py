"""The table of `resilient-jax replay` has what was compared; steps in between that nobody recorded are counted."""

import io

from rich.console import Console

from resilient_jax.cli.replay import tabulate
from resilient_jax.cli.replay_comparison import ComparedDigest


def make_row(step: int, committed: str) -> ComparedDigest:
    is_equal = committed == "ab" if committed else None
    return ComparedDigest(step=step, what="state", committed=committed, computed="ab", is_equal=is_equal)


def test_only_the_asked_step_and_recorded_ones_have_rows() -> None:
    rows = [make_row(step, "ab" if step % 64 == 63 else "") for step in range(70, 200)]
    rows.append(make_row(200, "cd"))
    shown = io.StringIO()
    Console(file=shown, width=100).print(tabulate(rows, 70))
    text = shown.getvalue()
    assert text.count("not recorded") == 1
    assert [step for step in range(70, 201) if f" {step} " in text] == [70, 127, 191, 200]
    assert "DIFFERS" in text
    assert "127 more steps were computed" in text
