"""`python tests/chaos` refuses bad arguments, and shrinks to a manifest that violates the same invariants."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from resilient_jax.errors import ExitCode
from tests.chaos import command_line as command
from tests.chaos.campaign import CampaignResult
from tests.chaos.invariants import Invariant, Violation
from tests.chaos.manifest import MAX_NUMBER, CampaignManifest, ChaosJob, load_manifest
from tests.chaos.manifest_toml import format_manifest
from tests.chaos.runner import CampaignSetup
from tests.pure.chaos.numbered_incidents import numbered, steps_of

SCRIPT = ("--", __file__)
Judge = Callable[[CampaignManifest], Sequence[Invariant]]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object, judge: Judge = lambda manifest: ()) -> tuple[int, str]:
        """Return exit code and messages of the command, whose campaigns violate what `judge` returns."""

        def run_campaign(
            manifest: CampaignManifest, setting: CampaignSetup, say: Callable[[str], None]
        ) -> CampaignResult:
            violations = tuple(
                Violation(invariant=invariant, description="") for invariant in judge(manifest)
            )
            return CampaignResult(
                incidents=(), violations=violations, samples=(), timeline=(), steps=0, duration_s=0.0
            )

        monkeypatch.setattr(command, "run_campaign", run_campaign)
        monkeypatch.setattr(sys, "argv", ["tests/chaos", "--json", *map(str, words), *SCRIPT])
        with pytest.raises(SystemExit) as end:
            command.main()
        assert isinstance(end.value.code, int)
        return end.value.code, " ".join(capsys.readouterr().err.replace("│", " ").split())

    return run


def test_a_campaign_without_violations_exits_with_0(run: Run, tmp_path: Path) -> None:
    assert run("--random", "--run-dir", tmp_path)[0] == ExitCode.DONE


@pytest.mark.parametrize(
    "words",
    [
        ("--gap", "inf"),
        ("--gap", "nan"),
        ("--gap", "0"),
        ("--seed", MAX_NUMBER + 1),
        ("--steps", MAX_NUMBER + 1),
    ],
)
def test_a_value_that_no_manifest_can_have_is_refused_with_its_option(
    run: Run, tmp_path: Path, words: tuple[object, ...]
) -> None:
    code, said = run("--random", *words, "--run-dir", tmp_path)
    assert code == ExitCode.USAGE
    assert str(words[0]) in said
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_named_once_and_only_an_etcd_cluster(run: Run, tmp_path: Path) -> None:
    path, store = tmp_path / "manifest.toml", "etcd://10.0.0.1:2379/jobs"
    path.write_text(format_manifest(CampaignManifest(job=ChaosJob(store="etcd"))))
    for given in (("--store", store), ("--store", "10.0.0.1:2379"), ("--store-tls", tmp_path)):
        code, said = run(*given, "--run-dir", tmp_path / "run", path)
        assert code == ExitCode.USAGE
        assert "store" in said
        assert not (tmp_path / "run").exists()
    assert run("--random", "--store", store, "--run-dir", tmp_path / "run")[0] == ExitCode.DONE


def test_an_unwritable_run_folder_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc/none")):
        code, said = run("--random", "--run-dir", folder)
        assert code == ExitCode.USAGE
        assert f"cannot write into the run folder {folder}: " in said


def test_a_shrunk_manifest_violates_the_same_invariants_as_the_full_one(run: Run, tmp_path: Path) -> None:
    """Invariants that are violated only because an incident is missing, as the one that ends the job, do not count."""

    def judge(manifest: CampaignManifest) -> Sequence[Invariant]:
        found = [Invariant.BITS] if {2, 5} <= steps_of(manifest) else []
        return found if 7 in steps_of(manifest) else [*found, Invariant.EXIT]

    path = tmp_path / "manifest.toml"
    path.write_text(format_manifest(numbered(8)))
    code, _ = run("--shrink", "--run-dir", tmp_path / "run", path, judge=judge)
    assert code == ExitCode.INTERNAL_ERROR
    assert steps_of(load_manifest(tmp_path / "run" / "minimal.toml")) == {2, 5}


def test_signal_handlers_are_restored_after_a_campaign(run: Run, tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run("--random", "--run-dir", tmp_path)
    assert [signal.getsignal(number) for number in numbers] == before
