"""The examples without and with this package: how many lines differ, and that both train."""

import difflib
import importlib

import pytest

from tests.support.full_only import full_but
from tests.support.paths import EXAMPLES

MOST_LINES = 10
each_pair = pytest.mark.parametrize("name", ["nnx", "linen", "own_loop"])


@each_pair
def test_at_most_ten_lines_change_or_are_added(name):
    before, after = (
        (EXAMPLES / f"{name}_{which}.py").read_text().splitlines() for which in ("before", "after")
    )
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(changed) <= MOST_LINES, "\n".join(changed)


@each_pair
@pytest.mark.parametrize("which", full_but(["before", "after"], "after".__eq__))
def test_an_example_trains_on_one_machine(name, which, capsys, monkeypatch):
    module = importlib.import_module(f"{name}_{which}")
    monkeypatch.setattr(module, "STEPS", 25)
    if name == "own_loop":
        module.rj.run(module.train) if which == "after" else module.train()
    else:
        module.main()
    assert "after 2" in capsys.readouterr().out  # 20 or 25 steps
