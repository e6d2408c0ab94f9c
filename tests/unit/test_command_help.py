"""`resilient-jax --help`: commands grouped by task, with a first example."""

import os
import subprocess
import sys

from resilient_jax.cli.main import COMMANDS


def test_help_groups_the_commands_by_task_and_begins_with_an_example() -> None:
    command = [sys.executable, "-m", "resilient_jax.cli.main", "--help"]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb"}
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=environment
    ).stdout
    lines = shown.splitlines()
    tasks = list(dict.fromkeys(spec.task for spec in COMMANDS.values()))
    headings = [next(i for i, line in enumerate(lines) if line.startswith(f"╭─ {task} ")) for task in tasks]
    assert headings == sorted(headings), shown
    for name, spec in COMMANDS.items():
        listed = [i for i, line in enumerate(lines) if line.startswith(f"│ {name} ")]
        group = headings[tasks.index(spec.task)]
        assert len(listed) == 1, f"{name} in\n{shown}"
        assert max(heading for heading in headings if heading < listed[0]) == group, f"{name} in\n{shown}"
    assert shown.index("resilient-jax launch --hosts 4") < shown.index("╭─"), "the example comes first"
