"""The command line teaches: `--help` with a first example, and what is meant by a wrong option."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient_jax.cli import main
from resilient_jax.cli.main import build_app
from resilient_jax.cli.options import check_script, note_misplaced_options
from resilient_jax.errors import CallerError, ExitCode


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


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_has_a_short_and_a_long_name_for_each_command(word: str) -> None:
    for command in ([], ["status"]):
        done = CliRunner().invoke(build_app(["status", "kill"]), [*command, word])
        assert done.exit_code == 0
        assert "Usage:" in done.output


def test_the_version_names_what_matters_for_a_report() -> None:
    done = CliRunner().invoke(build_app(["status", "kill"]), ["--version"])
    assert done.exit_code == 0
    assert re.fullmatch(r"resilient_jax [\d.]+, jax [\d.]+, jaxlib [\d.]+\n", done.output)


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(main.COMMANDS, "status", main.CommandSpec("slow_to_import", main.OBSERVE))
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert (end.value.code, *capfd.readouterr()) == (ExitCode.INTERRUPTED, "", "")
