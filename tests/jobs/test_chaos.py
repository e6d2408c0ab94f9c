"""Campaigns of each family, run as users run them; and jobs that violate an invariant, which must be detected."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.etcd_cluster import EtcdCluster
from tests.chaos.manifest import load_manifest
from tests.chaos.paths import CAMPAIGNS, CHAOS, COMMAND
from tests.jobs.pod import may_build_networks
from tests.support.patience import patience

FAMILIES = ("process", "snapshots", "step", "network", "resources")
ON_ETCD = "step"
JOB_SCRIPT = CHAOS / "jobs" / "chaos_job.py"
REGRESSIONS = sorted(path.stem for path in (CAMPAIGNS / "regressions").glob("*.toml"))
INCIDENTS = 10
CAMPAIGN_S = patience(40)


def run_chaos(*words: str) -> tuple[int, dict, str]:
    """Return the exit code, the figures, and the printed output."""
    done = subprocess.run(
        [*COMMAND, "--json", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CAMPAIGN_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, done.stderr


@pytest.fixture
def store_options(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[str]]:
    """Yield the options for a store that the campaign does not start, for one of the families."""
    if family != ON_ETCD or shutil.which("etcd") is None:
        yield ()
        return
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield ("--store", f"{cluster.address}/chaos")


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_job_survives_the_campaign_of_a_family(
    family: str, store_options: Sequence[str], tmp_path: Path
) -> None:
    code, figures, told = run_chaos("--campaign", family, *store_options, "--run-dir", str(tmp_path))
    assert code == 0, told
    assert figures["violations"] == 0, told
    assert figures["incidents"] + figures["skipped"] == INCIDENTS, told


@pytest.mark.full
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions_that_campaigns_found_stay_fixed(name: str, tmp_path: Path) -> None:
    manifest = load_manifest(CAMPAIGNS / "regressions" / f"{name}.toml")
    if manifest.job.network == "namespaces" and (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    code, figures, told = run_chaos("--campaign", f"regressions/{name}", "--run-dir", str(tmp_path))
    assert code == 0, told
    assert figures["violations"] == figures["skipped"] == 0, told


@pytest.mark.full
def test_a_snapshot_that_is_corrupted_in_memory_or_in_transit_is_not_restored(tmp_path: Path) -> None:
    code, figures, told = run_chaos("--campaign", "flips", "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (7, 0, 0), told


@pytest.mark.full
def test_training_resumes_from_the_newest_checkpoint_that_is_not_corrupt(tmp_path: Path) -> None:
    code, figures, told = run_chaos("--campaign", "checkpoints", "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (5, 0, 0), told


@pytest.mark.full
@pytest.mark.parametrize(("campaign", "incidents"), [("slow", 2), ("slow_input", 1), ("slow_link", 1)])
def test_a_host_that_becomes_slow_is_named_and_no_other(
    campaign: str, incidents: int, tmp_path: Path
) -> None:
    if campaign == "slow_link" and (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    code, figures, told = run_chaos("--campaign", campaign, "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (incidents, 0, 0), told


@pytest.mark.full
def test_a_host_that_loses_a_device_goes_on_without_it_and_bits_stay_equal(tmp_path: Path) -> None:
    code, figures, told = run_chaos("--campaign", "devices", "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (2, 0, 0), told


@pytest.mark.full
def test_a_host_that_comes_and_goes_is_quarantined_and_no_other(tmp_path: Path) -> None:
    code, figures, told = run_chaos("--campaign", "flapping", "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (3, 0, 0), told


@pytest.mark.full
@pytest.mark.parametrize("campaign", ["mesh", "mesh_planned"])
def test_replicas_over_hosts_survive_losses_in_each_of_them_and_while_they_come_back(
    campaign: str, tmp_path: Path
) -> None:
    code, figures, told = run_chaos("--campaign", campaign, "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (10, 0, 0), told


@pytest.mark.full
def test_what_surrounds_a_job_ends_nothing_that_it_does_not_hit(tmp_path: Path) -> None:
    code, figures, told = run_chaos("--campaign", "surroundings", "--run-dir", str(tmp_path))
    assert code == 0, told
    found = figures["incidents"] + figures["skipped"], figures["violations"]
    assert found == (len(load_manifest(CAMPAIGNS / "surroundings.toml").incidents), 0), told


@pytest.mark.full
def test_two_hosts_that_cannot_reach_each_other_end_nothing(tmp_path: Path) -> None:
    if (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    code, figures, told = run_chaos("--campaign", "cut_pair", "--run-dir", str(tmp_path))
    assert code == 0, told
    assert (figures["incidents"], figures["violations"], figures["skipped"]) == (1, 0, 0), told


def write_manifest(path: Path, *incidents: str) -> Path:
    path.write_text("[job]\nhosts = 2\n\n" + "\n\n".join(f"[[incidents]]\n{text}" for text in incidents))
    return path


KILL = 'trigger = { after_steps = 2 }\ntarget = { part = "worker", hosts = ["follower"] }\nfault = { kind = "kill" }'


def test_weights_that_depend_on_the_generation_are_detected(tmp_path: Path) -> None:
    """The report has the sequence of events and a complete manifest to reproduce them."""
    script = tmp_path / "unstable.py"
    source = JOB_SCRIPT.read_text()
    healthy = "else update(state, "
    assert source.count(healthy) == 1
    script.write_text(
        source.replace(
            healthy,
            "else update(state if world.generation == 1 or "
            "world.host == 'localhost' else jax.tree.map(lambda x: x + 1, state), ",
        )
    )
    manifest = write_manifest(tmp_path / "one.toml", KILL)
    code, figures, told = run_chaos(str(manifest), "--run-dir", str(tmp_path / "run"), "--", str(script))
    assert code == 89
    assert figures["violations"] > 0
    assert "VIOLATED weights and optimizer state are bit for bit" in told
    assert "campaign: SIGKILL to [" in told, "no story"
    assert " worker.exited" in told, "the story lacks the events of a host"
    assert Path(figures["manifest"]).read_text() == (
        "\n[job]\nhosts = 2\n\n[[incidents]]\ntrigger = { after_steps = 2 }\n"
        'target = { part = "worker", hosts = ["follower"] }\nfault = { kind = "kill" }\n'
    )


def test_a_manifest_that_does_not_fit_starts_nothing(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "bad.toml", KILL.replace("kill", "kil"))
    done = subprocess.run(
        [*COMMAND, str(manifest), "--", str(JOB_SCRIPT)],
        capture_output=True,
        text=True,
        timeout=patience(6),
        check=False,
    )
    assert done.returncode == 2
    assert f"{manifest}: key 'incidents[0].fault.kind'" in done.stderr
