"""The command line teaches: `--help` with a first example, and what is meant by a wrong option."""

import os
import subprocess
import sys

import pytest

from resilient_jax.cli.main import COMMANDS
from resilient_jax.cli.options import check_script, note_misplaced_options
from resilient_jax.errors import CallerError
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


@pytest.mark.parametrize("option", ["--num-hosts", "--num-hosts=4", "--host"])
def test_an_unknown_option_before_the_script_is_no_script(option: str) -> None:
    with pytest.raises(
        CallerError, match=r"option --\S*host\S*: found no such option.* Did you mean '--hosts'"
    ):
        check_script([option, "4", "train.py"], ["--hosts", "--devices-per-host", "--run-dir"])


def test_an_option_of_ours_after_the_script_gets_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    note_misplaced_options(["train.py", "--hosts=2", "--steps", "7", "--hosts", "3"], ["--hosts", "--config"])
    assert capfd.readouterr().out == (
        "note: --hosts after the script goes to the script; options of `resilient-jax` precede it\n"
    )
