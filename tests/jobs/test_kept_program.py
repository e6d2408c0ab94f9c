"""A job goes on with the program that it started with; the next job in the folder takes what is on disk then."""

import signal
from pathlib import Path

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.errors import ExitCode
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.snapshots import SnapshotPhase
from tests.jobs.launched import run_launch
from tests.jobs.pod import Pod, loopback_sites
from tests.support.agents import run_command, served_store
from tests.support.patience import wait_until
from tests.support.tiny_job import (
    CONFIG_WITHOUT_STANDBYS,
    ONE_DEVICE,
    SCRIPT,
    TinyJob,
    protect,
)

CONFIG = protect(CONFIG_WITHOUT_STANDBYS, 1)


def write_program(folder: Path) -> Path:
    """Write the tiny job's script with a module of its own, which has the learning rate; return the script."""
    source = SCRIPT.read_text()
    assert "optax.adamw(0.01)" in source
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(
        source.replace("optax.adamw(0.01)", "optax.adamw(FACTOR * settings.RATE)").replace(
            "import resilient_jax as rj\n",
            'import resilient_jax as rj\nimport settings\nFACTOR = 1.0\nprint(f"rate {FACTOR * settings.RATE}")\n',
        )
    )
    (folder / "settings.py").write_text("RATE = 0.01\n")
    return script


def edit(script: Path) -> None:
    """Change the learning rate in the script and in its module."""
    script.write_text(script.read_text().replace("FACTOR = 1.0", "FACTOR = 3.0"))
    script.with_name("settings.py").write_text("RATE = 0.02\n")


def have_snapshots(report: JobReport) -> bool:
    members = report.generation.membership.members if report.generation is not None else ()
    found = {h.host for h in report.hosts if any(s.phase is SnapshotPhase.COMMITTED for s in h.snapshots)}
    return bool(members) and found >= {member.host for member in members}


def wait_noticed(tiny: TinyJob, script: Path) -> list[Event]:
    """Wait until the job has said that both files changed; return the events."""

    wait_until("an event for each file", lambda: len(list_changes(tiny)) >= 2, tiny.patience_s)
    named = f"{script.with_name('settings.py')}, {script}"
    tiny.wait_report("it in the status", lambda r: all(host.changed_program == named for host in r.hosts))
    return list_changes(tiny)


def list_changes(tiny: TinyJob) -> list[Event]:
    return [event for event in tiny.job.read_events() if event.kind is EventKind.SCRIPT_CHANGED]


def test_a_job_of_one_host_goes_on_with_its_program_and_the_next_takes_the_edited_one(tmp_path: Path) -> None:
    script = write_program(tmp_path / "user")
    with TinyJob(tmp_path / "work", 1, CONFIG, options=ONE_DEVICE, script=script) as tiny:
        before = tiny.wait_report("a snapshot", have_snapshots)
        edit(script)
        changes = wait_noticed(tiny, script)
        assert {event.detail["file"] for event in changes} == {
            str(script),
            str(script.with_name("settings.py")),
        }
        assert "RATE = 0.01" in Path(str(min(event.detail["kept"] for event in changes))).read_text()
        code, shown = run_command(["status", str(tmp_path / "work" / "run")])
        assert code == 0
        (line,) = (line for line in shown.splitlines() if "changed on disk since the job began" in line)
        assert "settings.py" in line
        assert before.generation is not None
        tiny.signal(JobComponent.WORKER, "host-0", signal.SIGKILL)
        tiny.wait_training(1, before.generation.number)
        tiny.finish(more_steps=5)
        assert "rate 0.06" not in tiny.job.read_output()
        assert len(list_changes(tiny)) == 2, "not again by the worker that was started again"
    work = tmp_path / "next"
    work.mkdir()
    (work / "stop").write_text("2")
    ended = run_launch([str(script), str(work)], tmp_path / "work" / "run", hosts=1)
    assert ended.code == 0, ended.output
    logged = (tmp_path / "work" / "run" / "host-0.log").read_text()
    assert "rate 0.06" in logged, "a new job begins with what is on disk"


def test_a_job_whose_workers_are_all_replaced_goes_on_with_its_program(tmp_path: Path) -> None:
    script = write_program(tmp_path / "user")
    config = f'{CONFIG}abort = "replace"\n'
    with TinyJob(tmp_path / "work", 2, config, options=ONE_DEVICE, script=script) as tiny:
        tiny.wait_training(2)
        before = tiny.wait_report("snapshots", have_snapshots)
        pids = {host.worker.pid for host in before.hosts if host.worker is not None}
        edit(script)
        assert len(wait_noticed(tiny, script)) == 2, "once for each file, not for each host"
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        assert before.generation is not None
        after = tiny.wait_training(2, before.generation.number)
        assert pids.isdisjoint(host.worker.pid for host in after.hosts if host.worker is not None)
        assert after.generation is not None
        tiny.wait_report("snapshots", have_snapshots)
        tiny.signal(JobComponent.HOST, "host-1", signal.SIGKILL)  # its agent, too, is another one
        tiny.wait_training(2, after.generation.number)
        tiny.finish(more_steps=5)
        events = tiny.job.read_events()
    assert not [event for event in events if event.kind is EventKind.SCRIPT_REFUSED]


def test_a_host_of_a_pod_comes_back_with_the_program_and_a_new_one_with_another_is_refused(
    tmp_path: Path,
) -> None:
    script = write_program(tmp_path / "user")
    with served_store() as store, Pod(tmp_path, store, loopback_sites(3), num_hosts=2, script=script) as pod:
        before = pod.wait_training(2)
        assert before.generation is not None
        edit(script)
        pod.agents["host-1"].kill()
        pod.start("host-1")  # with the copies in its run folder
        pod.wait_training(2, before.generation.number)
        pod.start("host-2")  # which has none
        refused = pod.agents.pop("host-2")
        assert refused.wait() == ExitCode.SCRIPT_DIFFERS, pod.output()
        assert "host host-2 runs another script than the job" in refused.output()
        assert "script: found" in refused.output()
        pod.wait_training(2)
        pod.finish()
