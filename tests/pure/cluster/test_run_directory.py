"""The run directory, which belongs to one job while that job runs."""

import contextlib
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.run_directory import (
    CONTACT_FILE,
    EndedJob,
    HostLog,
    JobContact,
    claim_directory,
    create_numbered_directory,
    create_run_directory,
    forget_end,
    make_log_path,
    read_contact,
    read_ended_job,
    read_host_ends,
    remove_contact,
    write_contact,
    write_ended_job,
)
from resilient_jax.errors import CallerError, ConfigError, LogUnwritable
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind

OURS = JobContact(job="job", store="127.0.0.1:1", token="ours", launcher_pid=1)
THEIRS = JobContact(job="job", store="127.0.0.1:2", token="theirs", launcher_pid=2)


def test_a_new_run_directory_is_unique(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "20250101-000000"
    made = [create_numbered_directory(wanted) for _ in range(3)]
    assert [path.name for path in made] == ["20250101-000000", "20250101-000000-2", "20250101-000000-3"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 and list(path.iterdir()) == [] for path in made)


def test_a_new_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogUnwritable, match=r"file/run: Not a directory; expected a folder"):
        create_numbered_directory(tmp_path / "file" / "run")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_nothing_is_refused_and_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    ended = EndedJob(
        job="job", outcome=JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0), step=3, metrics={}, wall_s=0.0
    )
    with full_disk():
        with pytest.raises(LogUnwritable, match="expected a folder that this user may write, on a disk with"):
            create_run_directory(tmp_path)
        with pytest.raises(LogUnwritable, match="Choose another with --run-dir, or free space"):
            write_contact(tmp_path, OURS)
        write_ended_job(tmp_path, ended)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_claimed_by_one_job_at_a_time(tmp_path: Path) -> None:
    with claim_directory(tmp_path):  # noqa: SIM117 - the second claim alone is refused
        with (
            pytest.raises(CallerError, match="found a job that still runs in this folder"),
            claim_directory(tmp_path),
        ):
            pass
    with claim_directory(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user, which root alone may")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match=r"run: found owner 12345, expected a folder of this user"):
        create_run_directory(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_that_everybody_could_write_is_refused_and_a_new_one_in_it_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "planted").touch()
    folder.chmod(0o777)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"mode 777 and files.*Choose one that is not there yet"):
            create_run_directory(folder)
    assert create_run_directory(folder / "run").stat().st_mode & 0o777 == 0o700


def test_an_empty_folder_that_everybody_may_write_is_taken_and_is_the_users_alone_then(
    tmp_path: Path,
) -> None:
    """As a volume that was just mounted."""
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o1777)
    for _ in range(2):
        create_run_directory(folder)
        assert folder.stat().st_mode & 0o777 == 0o755
        (folder / "host-0.log").touch()


def test_the_group_may_not_write_into_a_folder_that_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o775)
    assert create_run_directory(folder).stat().st_mode & 0o777 == 0o755


def test_a_link_in_place_of_a_file_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("of somebody")
    for name in ("job.json", "job.unfinished"):
        (tmp_path / name).symlink_to(elsewhere)
    write_contact(tmp_path, OURS)
    assert elsewhere.read_text() == "of somebody"
    assert read_contact(tmp_path) == OURS


def test_only_the_user_can_read_the_contact_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    write_contact(tmp_path, OURS)
    assert stat.S_IMODE((tmp_path / CONTACT_FILE).stat().st_mode) == 0o600
    assert read_contact(tmp_path) == OURS
    assert [path.name for path in tmp_path.iterdir()] == [CONTACT_FILE]


def test_a_job_removes_only_its_own_contact(tmp_path: Path) -> None:
    write_contact(tmp_path, THEIRS)
    remove_contact(tmp_path, OURS)
    assert read_contact(tmp_path) == THEIRS
    remove_contact(tmp_path, THEIRS)
    assert list(tmp_path.iterdir()) == []
    remove_contact(tmp_path, THEIRS)


def test_the_end_of_a_job_is_kept_until_the_next_begins(tmp_path: Path) -> None:
    outcome = JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0)
    ended = EndedJob(job="job", outcome=outcome, step=3, metrics={}, wall_s=0.0)
    assert read_ended_job(tmp_path) is None
    write_ended_job(tmp_path, ended)
    assert read_ended_job(tmp_path) == ended
    write_contact(tmp_path, OURS)
    remove_contact(tmp_path, OURS)
    assert read_ended_job(tmp_path) is None


def test_an_agent_keeps_its_end_beside_those_of_others_until_it_begins_again(tmp_path: Path) -> None:
    outcome = JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=130)
    ended = EndedJob(job="job", outcome=outcome, step=3, metrics={}, wall_s=0.0)
    for host in ("host-0", "host-1", "host-2"):
        make_log_path(tmp_path, host, HostLog.EVENTS).touch()
    write_ended_job(tmp_path, ended)
    for host in ("host-0", "host-1"):
        write_ended_job(tmp_path, ended, host)
    assert read_host_ends(tmp_path) == {"host-0": ended, "host-1": ended, "host-2": None}
    forget_end(tmp_path, "host-1")
    assert read_host_ends(tmp_path) == {"host-0": ended, "host-1": None, "host-2": None}
    assert read_ended_job(tmp_path) is None, "that was a job before"


def test_a_damaged_end_of_a_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job_end.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"job_end\.json: cannot be read .* expected what `launch` or an agent wrote there"
    ):
        read_ended_job(tmp_path)


def test_without_a_folder_the_end_of_a_job_is_not_written(tmp_path: Path) -> None:
    outcome = JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0)
    ended = EndedJob(job="job", outcome=outcome, step=3, metrics={}, wall_s=0.0)
    write_ended_job(tmp_path / "absent", ended)
    assert read_ended_job(tmp_path / "absent") is None
