"""The directory of one job on one machine: logs, events, how to reach the job, and how it ended."""

import contextlib
import enum
import fcntl
import hashlib
import itertools
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from resilient_jax.errors import CallerError, ConfigError, LogUnwritable, MessageError
from resilient_jax.protocol.generation import JobOutcome
from resilient_jax.protocol.message_decoding import decode_message

CONTACT_FILE = "job.json"
END_FILE = "job_end.json"
LOCK_FILE = "launcher.lock"
"""Stays in the directory: if it were removed, two launchers could each lock a file of that name."""


class HostLog(enum.StrEnum):
    """A log of a host in the run folder of its agent; the value is what the file's name has after the host's."""

    EVENTS = "events.jsonl"
    """The events, one JSON object a line."""
    OUTPUT = "log"
    """All that the host's workers print."""
    DIGESTS = "digests.jsonl"
    """Digests of what was computed while the host was the first one, to check steps by `resilient-jax replay`."""
    ZYGOTE = "zygote.txt"
    """What libraries print when the host's zygote imports them."""


def make_log_path(directory: Path, host: str, log: HostLog) -> Path:
    """Return where an agent writes a log of its host."""
    return directory / f"{host}.{log}"


def find_logs(directory: Path, log: HostLog) -> dict[str, Path]:
    """Return the files of this log in a run folder by host, in order of the hosts' names."""
    ending = f".{log}"
    return {path.name.removesuffix(ending): path for path in sorted(directory.glob(f"*{ending}"))}


class JobContact(msgspec.Struct, frozen=True, kw_only=True):
    """How commands reach a running job. Holds its token: readable by its user alone.

    Attributes:
        token: secret that the job's processes share.
        tls: folder with certificates for an embedded store; "" for none.
        store_tls: folder with certificates for an etcd cluster; "" for none.
    """

    job: str
    store: str
    token: str
    launcher_pid: int
    tls: str = ""
    store_tls: str = ""


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    """How the last job in a run folder ended, or a hand-started agent's part in it.

    Attributes:
        job: the job's name.
        outcome: how it ended, with the exit code of `launch` or the agent.
        step: the newest committed step.
        metrics: the metrics of that step.
        wall_s: when the job ended, in seconds since 1970.
    """

    job: str
    outcome: JobOutcome
    step: int
    metrics: dict[str, float]
    wall_s: float


_CONTACT_DECODER = msgspec.json.Decoder(JobContact)
_ENDED_JOB_DECODER = msgspec.json.Decoder(EndedJob)


def create_run_directory(path: Path) -> Path:
    """Create the directory, for this user alone; one that is there already only if nobody else wrote there.

    Raises:
        ConfigError: the directory is another user's, or has files that anybody could write: the job's token, program
            and compiled programs would be in others' hands.
        LogUnwritable: the directory cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(path)
        probe = path / f".writable-{os.getpid()}"  # several agents share the directory
        with _removed_at_failure(probe):
            probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _check_owner(path: Path) -> None:
    """Let nobody else write into a folder that is there already, and refuse one into which others may have written."""
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    is_own = found.st_uid == os.geteuid()
    if is_own and mode & (stat.S_IWGRP | stat.S_IWOTH):
        path.chmod(mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    # A volume that was just mounted is often everybody's; with nothing in it there is nothing to mistrust.
    is_doubtful = bool(mode & stat.S_IWOTH) and any(path.iterdir())
    if is_own and not is_doubtful:
        return
    if is_own:
        path.chmod(mode)
    found_there = f"owner {found.st_uid}" + (f", mode {mode:03o} and files" if is_own else "")
    raise ConfigError(
        f"run folder {path}: found {found_there}, expected a folder of this user ({os.geteuid()}) into which nobody "
        f"else could write. Choose one that is not there yet, such as {path / 'run'}"
    )


def create_numbered_directory(path: Path) -> Path:
    """Create the first of the directories NAME, NAME-2, NAME-3, ... that is absent: no two callers get the same.

    Raises:
        LogUnwritable: the directory cannot be created or written.
    """
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for candidate in itertools.chain([path], others):
        try:
            candidate.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(candidate, error) from error
        return create_run_directory(candidate)
    raise AssertionError("there is always a next number")


def _unwritable(path: Path, error: OSError) -> LogUnwritable:
    return LogUnwritable(
        f"cannot write into the run folder {path}: {error.strerror}; expected a folder that this user may "
        "write, on a disk with free space. Choose another with --run-dir, or free space"
    )


class DirectoryClaim:
    """A run folder that no other launcher takes, also while somebody removes it.

    The kernel holds two locks for this process and drops them with the process: one on a file of the folder, which
    counts for all machines that see the folder, and one on the folder's name, which outlives the folder. A process
    number in a file would outlive a killed launcher, and may be reused for another process.
    """

    def __init__(self, directory: Path) -> None:
        """Claim the directory.

        Raises:
            CallerError: another launcher has claimed it.
            LogUnwritable: the directory cannot be written, or its file system has no locks.
        """
        self._directory = directory
        self._name = _lock_name(directory)
        try:
            self._descriptor = _lock_file(directory)
        except BaseException:
            self._name.close()
            raise

    def restore(self) -> bool:
        """Make the folder and the lock in it again if somebody has removed them; return whether that was done.

        Raises:
            CallerError: another launcher has claimed it meanwhile.
            LogUnwritable: the directory cannot be written.
        """
        try:
            if os.path.samestat((self._directory / LOCK_FILE).stat(), os.fstat(self._descriptor)):
                return False
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a file system that does not answer now
            return False
        create_run_directory(self._directory)
        removed, self._descriptor = self._descriptor, _lock_file(self._directory)
        os.close(removed)
        return True

    def close(self) -> None:
        """Let another launcher have the folder."""
        os.close(self._descriptor)
        self._name.close()


@contextlib.contextmanager
def claim_directory(directory: Path) -> Iterator[DirectoryClaim]:
    """Claim the directory: within the `with` no other launcher starts a job in it.

    Raises:
        CallerError: another launcher has claimed it.
        LogUnwritable: the directory cannot be written, or its file system has no locks.
    """
    with contextlib.closing(DirectoryClaim(directory)) as claim:
        yield claim


def _lock_file(directory: Path) -> int:
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise _claimed(directory) from error
        raise _unwritable(directory, error) from error  # a file system without locks
    return descriptor


def _lock_name(directory: Path) -> socket.socket:
    """Return what holds the folder's name in this machine's (abstract) name space of sockets."""
    path = directory.resolve()
    found = path.parent.stat()  # not the parent's path: containers have other folders of the same path
    name = f"{found.st_dev}:{found.st_ino}/{path.name}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0resilient-jax/{hashlib.sha256(os.fsencode(name)).hexdigest()}")
    except OSError as error:
        lock.close()
        raise _claimed(directory) from error
    return lock


def _claimed(directory: Path) -> CallerError:
    return CallerError(
        f"{directory}: found a job that still runs in this folder, expected one of its own for each job. "
        f"Choose another with --run-dir, or wait until that one ends (`resilient-jax status {directory}`)"
    )


def write_contact(directory: Path, contact: JobContact) -> None:
    """Write how to reach the job, and forget how the one before it ended. The directory must have been claimed.

    Raises:
        LogUnwritable: the file cannot be written.
    """
    try:
        (directory / END_FILE).unlink(missing_ok=True)
        _write_atomically(directory / CONTACT_FILE, contact)
    except OSError as error:
        raise _unwritable(directory, error) from error


def write_ended_job(directory: Path, ended: EndedJob, host: str = "") -> None:
    """Write how the job ended, for `status`. A full disk does not change how it ended: then nothing is written.

    Args:
        host: the host whose agent writes what it knows; empty: the job's launcher does.
    """
    with contextlib.suppress(OSError):
        _write_atomically(_make_end_path(directory, host), ended)


def forget_end(directory: Path, host: str) -> None:
    """Forget how the jobs before ended, as a hand-started agent of this host begins."""
    for path in (directory / END_FILE, _make_end_path(directory, host)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _make_end_path(directory: Path, host: str) -> Path:
    return directory / (f"{host}.{END_FILE}" if host else END_FILE)


def read_host_ends(directory: Path) -> dict[str, EndedJob | None]:
    """Return what each hand-started agent of this folder wrote at its end; None: it runs, or was killed.

    Raises:
        ConfigError: a file cannot be read.
    """
    return {host: _read_end(_make_end_path(directory, host)) for host in find_logs(directory, HostLog.EVENTS)}


def _write_atomically(path: Path, content: msgspec.Struct) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)  # of a process that was killed; never a file that a link leads to
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with _removed_at_failure(unfinished), os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(content))
    unfinished.replace(path)


@contextlib.contextmanager
def _removed_at_failure(path: Path) -> Iterator[None]:
    """Remove the file when it cannot be written: a full disk has room for the name of an empty one."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def remove_contact(directory: Path, contact: JobContact) -> None:
    """Remove the contact of a job that is over; the contact of another job stays."""
    with contextlib.suppress(ConfigError):  # already removed
        if read_contact(directory) == contact:
            (directory / CONTACT_FILE).unlink(missing_ok=True)


def read_ended_job(directory: Path) -> EndedJob | None:
    """Return how the last job in `directory` ended; None: it runs, or its launcher was killed, or there was none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if (directory / CONTACT_FILE).exists():
        return None
    return _read_end(directory / END_FILE)


def _read_end(path: Path) -> EndedJob | None:
    try:
        return decode_message(_ENDED_JOB_DECODER, path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except (OSError, MessageError) as error:
        raise _unreadable(path, error) from error


def read_contact(directory: Path) -> JobContact:
    """Return how to reach the job that runs in `directory`.

    Raises:
        ConfigError: no job runs there.
    """
    path = directory / CONTACT_FILE
    try:
        return decode_message(_CONTACT_DECODER, path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: found no such file, so no job runs in {directory}; expected the run folder of a running "
            "job: `launch` prints it first"
        ) from error
    except (OSError, MessageError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({error}); expected what `launch` or an agent wrote there")
