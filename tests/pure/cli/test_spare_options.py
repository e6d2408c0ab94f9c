"""`agent --spare` and `launch --spares`: what cannot work is refused before anything is started."""

import sys
from pathlib import Path

import pytest

from resilient_jax.cli import main
from resilient_jax.cli.options import check_spares
from resilient_jax.cluster.launcher import TOKEN_VARIABLE
from resilient_jax.config import JobConfig
from resilient_jax.errors import CallerError, ExitCode

FEW_SEATS = JobConfig(spare_seats=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["launch", "--hosts", "1", "--spares", "1"],
            "--spares: found a spare for a job of 1 host, expected",
        ),
        (["launch", "--hosts", "3", "--spares", "-1"], "--spares: found -1, expected 0 or more"),
        (
            ["launch", "--hosts", "3", "--spares", "2", "--config", "job.toml"],
            "--spares: found 2 spares for 1 spare seats, expected a seat for each",
        ),
        (
            ["launch", "--hosts", "240", "--spares", "11"],
            "--spares: found 11 beside 240 hosts, expected at most 250 in all on one machine",
        ),
        (
            ["agent", "--store", "127.0.0.1:1", "--job", "j", "--spare"],
            "--spare: found a spare for a job of 1 host, expected at least 2 hosts beside the spares",
        ),
        (
            [
                *[
                    "agent",
                    "--store",
                    "127.0.0.1:1",
                    "--job",
                    "j",
                    "--num-hosts",
                    "2",
                    "--spare",
                    "--platform",
                    "cpu",
                    "--config",
                    "none.toml",
                ]
            ],
            "--spare: found 1 spare for 0 spare seats, expected a seat for each, in which it waits",
        ),
    ],
)
def test_spares_that_cannot_work_are_refused(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    Path("script.py").write_text("")
    Path("job.toml").write_text("spare_seats = 1\n")
    Path("none.toml").write_text("spare_seats = 0\n")
    monkeypatch.setattr(sys, "argv", ["resilient-jax", *arguments, "--run-dir", "run", "script.py"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == ExitCode.USAGE
    assert words in capsys.readouterr().err
    assert not Path("run").exists()


def test_one_spare_fewer_than_refused_is_let_through() -> None:
    check_spares("--spares", 1, 2, FEW_SEATS, "cpu")
    with pytest.raises(CallerError, match="found 2 spares for 1 spare seats"):
        check_spares("--spares", 2, 2, FEW_SEATS, "cpu")


@pytest.mark.parametrize("platform", ["gpu", None])
def test_where_worlds_have_no_spare_seats_spares_need_none(platform) -> None:
    check_spares("--spares", 2, 2, FEW_SEATS, platform)
    check_spares("--spares", 2, 2, JobConfig(spare_seats=1, abort="replace"), "cpu")
