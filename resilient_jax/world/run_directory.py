"""The folder of one job on one machine: logs, events, and how to reach the job."""

import os
from pathlib import Path

import msgspec

from resilient_jax.errors import ConfigError, LogUnwritable

CONTACT_FILE = "job.json"


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """How commands reach a running job. Holds its token: readable by its user alone."""

    job: str
    store: str
    token: str
    launcher_pid: int


def create(path: Path) -> Path:
    """Makes the folder, for this user alone.

    Raises:
        LogUnwritable: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = path / f".writable-{os.getpid()}"  # several agents share the folder
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise LogUnwritable(
            f"cannot write into the run folder {path}: {error.strerror}; expected a folder that this user may "
            "write, on a disk with free space. Choose another with --run-dir, or free space"
        ) from error
    return path


def write_contact(directory: Path, contact: Contact) -> None:
    """Leaves word of how to reach the job."""
    path = directory / CONTACT_FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(contact))


def remove_contact(directory: Path) -> None:
    """The job is over: nobody can be reached any more."""
    (directory / CONTACT_FILE).unlink(missing_ok=True)


def read_contact(directory: Path) -> Contact:
    """How to reach the job that runs in `directory`.

    Raises:
        ConfigError: no job runs there.
    """
    path = directory / CONTACT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Contact)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: found no such file, so no job runs in {directory}; expected the run folder of a running "
            "job: `launch` says first which it is"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected what `launch` wrote there") from error
