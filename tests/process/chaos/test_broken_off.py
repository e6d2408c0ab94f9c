"""A campaign that is told to end, or killed, leaves nothing behind; its two runs have the same devices and flags.

The script here does not train: the first run ends at once or never, the job waits for whatever comes.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.paths import COMMAND
from tests.support.patience import patience, wait_until

SCRIPT = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "flags.tmp").write_text(os.environ["XLA_FLAGS"])
(folder / "flags.tmp").rename(folder / "flags")
time.sleep(0 if folder.name == sys.argv[2] else 600)
"""
UNDISTURBED, CAMPAIGN = "reference", "campaign"
"""Folders of the two runs in the run folder."""
COUNT = "--xla_force_host_platform_device_count"


@contextlib.contextmanager
def running_chaos(
    folder: Path, *, ends: str, job: str = "hosts = 1", flags: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """`python tests/chaos` with a script that ends at once in the run whose folder `ends` names."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "manifest.toml").write_text(f"[job]\n{job}\n")
    words = [str(folder / "manifest.toml"), "--run-dir", str(folder / "run"), "--"]
    process = subprocess.Popen(
        # Whoever runs the tests in the background has signals ignored, which the command would keep to.
        [
            *("env", "--default-signal=TERM,HUP"),
            *(*COMMAND, *words, str(folder / "script.py"), "{folder}", ends),
        ],
        env={**os.environ, "TMPDIR": str(folder), "XLA_FLAGS": flags},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        try:
            wait_until("the end of all processes", lambda: not processes_of(folder))
        finally:
            for pid in processes_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Whatever was started with this folder for its temporary files, whoever its parent is by now."""
    mark = f"TMPDIR={folder}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def wait_script(process: subprocess.Popen[bytes], folder: Path, run: str) -> Path:
    """Waits until the script runs; gives the file with its flags."""
    path = folder / "run" / run / "flags"
    wait_until(f"the {run} run", lambda: path.exists() or process.poll() is not None)
    assert process.poll() is None, "it ended before"
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_campaign_that_is_told_to_end_ends_the_undisturbed_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running_chaos(tmp_path, ends=CAMPAIGN) as process:
        wait_script(process, tmp_path, UNDISTURBED)
        process.send_signal(number)
        assert process.wait(patience(6)) == 128 + number
        assert processes_of(tmp_path) == []


def test_the_undisturbed_run_dies_with_the_campaign(tmp_path: Path) -> None:
    with running_chaos(tmp_path, ends=CAMPAIGN) as process:
        wait_script(process, tmp_path, UNDISTURBED)
        process.kill()


def may_mount(folder: Path) -> bool:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


def test_a_campaign_that_is_told_to_end_ends_the_job_and_takes_its_disk_away(tmp_path: Path) -> None:
    if not may_mount(tmp_path / "probe"):
        pytest.skip("mounting a disk needs root")
    disk = tmp_path / "run" / CAMPAIGN / "run"
    with running_chaos(tmp_path, ends=UNDISTURBED, job="hosts = 1\ndisk_mib = 8") as process:
        try:
            wait_script(process, tmp_path, CAMPAIGN)
            assert disk.is_mount()
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience(6)) == 128 + signal.SIGTERM
            assert not disk.is_mount()
            assert processes_of(tmp_path) == []
        finally:
            if disk.is_mount():
                subprocess.run(["umount", "-l", str(disk)], check=True)


def test_both_runs_have_the_flags_of_the_environment_and_the_devices_of_the_manifest(tmp_path: Path) -> None:
    flags = f"--xla_cpu_enable_fast_math=false {COUNT}=2"
    with running_chaos(
        tmp_path, ends=UNDISTURBED, job="hosts = 1\ndevices_per_host = 3", flags=flags
    ) as process:
        for run in (UNDISTURBED, CAMPAIGN):
            found = wait_script(process, tmp_path, run).read_text().split()
            assert [flag for flag in found if flag.startswith(COUNT)] == [f"{COUNT}=3"], run
            assert "--xla_cpu_enable_fast_math=false" in found, run
