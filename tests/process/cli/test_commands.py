"""Commands as processes: what they print, load, and say about an output that cannot be written."""

import os
import subprocess
import sys

import pytest

from resilient_jax.cli.main import COMMANDS
from resilient_jax.errors import ExitCode
from tests.support.paths import MESHES
from tests.support.patience import patience


def test_help_groups_the_commands_by_task_and_begins_with_an_example() -> None:
    command = [sys.executable, "-m", "resilient_jax.cli.main", "--help"]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb"}
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=patience(6), env=environment
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


@pytest.mark.parametrize(
    ("redirection", "why"), [(">/dev/full", "No space left on device"), (">&-", "it is closed")]
)
def test_unwritable_standard_output_is_an_error_of_one_line(redirection, why):
    command = [sys.executable, "-m", "resilient_jax.cli.main", "plan", "--check", MESHES / "h100_1x8.toml"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=patience(6),
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        ExitCode.USAGE,
        f"resilient-jax: standard output: found that it cannot be written ({why}), expected a terminal, a file or a "
        "pipe that takes the result. Free space, or send it elsewhere\n",
    )


def test_the_command_imports_no_jax():
    program = (
        "import sys\nimport resilient_jax.cli.plan\nprint(*sorted({'jax', 'flax'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(6), check=True
    )
    assert result.stdout.split() == []
