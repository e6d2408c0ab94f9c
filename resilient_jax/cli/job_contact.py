"""How a command finds the job that it is about: by its run folder on this machine, or by its store."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.cluster.run_directory import JobContact, read_contact, remove_contact
from resilient_jax.errors import CallerError, Unauthenticated
from resilient_jax.store.etcd_address import is_etcd_address
from resilient_jax.transport.credentials import MISSING_TOKEN, TOKEN_VARIABLE

RunDirectoryArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Run folder of a job on this machine; else give --store and --job.", metavar="[RUN_DIR]"
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(help="With --job, instead of a run folder: the job's store, as its agents have it."),
]
JobOption = Annotated[str | None, typer.Option(help="Name of the job, as its agents have it.")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job by its store, as the command line names it.

    Attributes:
        store: the address of the store of the job's agents.
        job: the job's name.
        tls: the folder with certificates for our own traffic.
        store_tls: the folder with certificates for an etcd cluster.
    """

    store: str
    job: str
    tls: Path | None
    store_tls: Path | None

    def make_contact(self, *, calls_agents: bool) -> JobContact:
        """Return how to reach the job.

        Args:
            calls_agents: whether its agents are called, too, which want the token; etcd knows none.

        Raises:
            Unauthenticated: the environment has no token.
        """
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token and not calls_agents and is_etcd_address(self.store):
            token = "unused"
        if not token:
            raise Unauthenticated(MISSING_TOKEN)
        return JobContact(
            job=self.job,
            store=self.store,
            token=token,
            launcher_pid=os.getpid(),
            tls=str(self.tls or ""),
            store_tls=str(self.store_tls or ""),
        )


def choose_job(
    run_directory: Path | None, store: str | None, job: str | None, tls: Path | None, store_tls: Path | None
) -> Path | RemoteJob:
    """Return by what a command finds a job: the run folder, or anywhere the store and the job's name.

    Raises:
        CallerError: both or neither were given.
    """
    if run_directory is not None and store is None and job is None:
        return run_directory
    if run_directory is not None or store is None or job is None:
        found = [
            name
            for name, value in (("RUN_DIR", run_directory), ("--store", store), ("--job", job))
            if value is not None
        ]
        raise CallerError(
            f"found {' and '.join(found) or 'neither a run folder nor a store'}, expected either the run folder of a "
            "job on this machine, which `launch` prints first, or --store and --job as its agents have them"
        )
    return RemoteJob(store=store, job=job, tls=tls, store_tls=store_tls)


def read_live_contact(run_directory: Path) -> JobContact:
    """Return how to reach the job of this machine that runs in a folder.

    Raises:
        CallerError: no job runs there, or its launcher was killed before it could remove the contact file.
    """
    contact = read_contact(run_directory)
    if not Path(f"/proc/{contact.launcher_pid}").exists():
        remove_contact(run_directory, contact)
        raise CallerError(
            f"{run_directory}: found a job whose launcher (process {contact.launcher_pid}) was killed, expected one "
            "that runs on this machine. Launch the job again"
        )
    return contact
