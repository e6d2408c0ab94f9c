"""Agrees with the job's other hosts on the program that they run, and lets a worker in only with that one.

The first agent gives the program an id, under which each host keeps the files of it in its run folder. The first worker
that is ready describes its script in the same record of the store, and the others compare theirs with it. The record
stands as long as a host with this program lives, and in `launch` as long as that does: a job whose hosts have all ended
can be started again with a script that was mended, and a host that comes back to the others goes on with the kept one.
"""

import shutil
import urllib.parse
import uuid
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.kept_program import SCRIPT_MODULE, KeptProgram
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.config import JobConfig
from resilient_jax.errors import LogUnwritable, ScriptRefused
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.job_records import ScriptRecord
from resilient_jax.protocol.store_keys import make_host_key, make_hosts_prefix, make_script_key
from resilient_jax.store.interface import PutOp, Store, require_absent, require_unchanged

PROGRAMS_FOLDER: Final = "programs"
"""In the run folder: a folder for each job, with one for the program that it runs."""
MAX_NAMED: Final = 4
"""Differences that an error gives with both values; one library of another version may change many modules."""


class ScriptAdmission:
    """The program of this host, and its comparison with that of the job.

    Attributes:
        program: id of the program; empty before `settle`.
        kept: files of the program in the run folder; None before `settle`, and without a run folder.
    """

    def __init__(self, store: Store, settings: AgentSettings, agent_id: str) -> None:
        self._store = store
        self._settings = settings
        self._agent_id = agent_id
        self.program = ""
        self.kept: KeptProgram | None = None
        self._admitted: dict[str, str] | None = None

    @property
    def folder(self) -> str:
        """The folder of `kept`; empty if there is none."""
        return str(self.kept.folder) if self.kept is not None else ""

    async def settle(self) -> None:
        """Choose the program of the job that other hosts run, or begin another one with the script on disk; once.

        To be called while this host is registered: an earlier agent of the same host must not count as another one.

        Raises:
            LogUnwritable: the script cannot be kept.
            PeerUnreachable: the store does not answer.
        """
        key = make_script_key(self._settings.job)
        program = ""
        while not program and not self.program:
            stored = await self._store.get(key)
            record = decode_record(stored, ScriptRecord) if stored is not None else None
            if record is not None and await self._is_in_use(record):
                program = record.program
                continue
            begun = self._make_record(uuid.uuid4().hex[:16], {})
            expected = require_unchanged(stored) if stored is not None else require_absent(key)
            result = await self._store.transaction([expected], [PutOp(key, ENCODER.encode(begun))], [])
            program = begun.program if result.succeeded else ""
        if program:
            self._keep_script(program)
            self.program = program

    async def admit(self, script: dict[str, str]) -> None:
        """Return if the hosts of the job run this script.

        Args:
            script: description of the script, as `describe_script` returns it.

        Raises:
            ScriptRefused: the hosts run another script; the message has both values of what differs.
            PeerUnreachable: the store does not answer.
        """
        key, items = (
            make_script_key(self._settings.job),
            {**script, **_describe_config(self._settings.config)},
        )
        mine = self._make_record(self.program, items)
        while True:
            stored = await self._store.get(key)
            job = decode_record(stored, ScriptRecord) if stored is not None else None
            if job is not None and (differences := _list_differences(items, job.items)):
                raise ScriptRefused(_describe_refusal(mine, job, differences))
            if job is not None and job.items:
                break
            # Nobody has described the script yet.
            described = mine if job is None else msgspec.structs.replace(mine, program=job.program)
            put = PutOp(key, ENCODER.encode(described))
            expected = require_unchanged(stored) if stored is not None else require_absent(key)
            if (await self._store.transaction([expected], [put], [])).succeeded:
                break
        self._admitted = script

    def find_difference(self, script: dict[str, str]) -> str:
        """Return how a standby's script differs from that of this host's worker; empty: it does not."""
        if self._admitted is None:
            return "no worker was let in"
        differences = _list_differences(script, self._admitted)
        return f"found another {', '.join(differences[:MAX_NAMED])} than the worker's" if differences else ""

    async def _is_in_use(self, job: ScriptRecord) -> bool:
        """Return whether another living host runs the job's program, or has begun it and is about to."""
        # Of `launch` the store has this record exactly as long as the job runs.
        if self._settings.is_launched or job.agent_id == self._agent_id:
            return True
        # Where all of thousands of hosts start, the one that began it is alive: not each of them reads all statuses.
        first = await self._store.get(make_host_key(self._settings.job, job.host))
        if first is not None and decode_record(first, HostStatus).agent.id == job.agent_id:
            return True
        _, found = await self._store.range(make_hosts_prefix(self._settings.job))
        others = [decode_record(stored, HostStatus) for stored in found]
        return any(
            other.agent.id == job.agent_id or other.program == job.program
            for other in others
            if other.agent.id != self._agent_id
        )

    def _make_record(self, program: str, items: dict[str, str]) -> ScriptRecord:
        return ScriptRecord(host=self._settings.host, agent_id=self._agent_id, program=program, items=items)

    def _keep_script(self, program: str) -> None:
        directory = self._settings.run_directory
        if directory is None:
            return
        folder = (directory / PROGRAMS_FOLDER / urllib.parse.quote(self._settings.job, safe="")).absolute()
        kept, script = KeptProgram(folder / program), Path(self._settings.command[0])
        try:
            kept.create()
            kept.keep(SCRIPT_MODULE, str(script))
            for earlier in folder.iterdir():  # no host of the job runs them any more
                if earlier.name != program:
                    shutil.rmtree(earlier, ignore_errors=True)
        except OSError as error:
            raise LogUnwritable(
                f"cannot keep a copy of {script} in the run folder {directory}: {error}; expected a script that can be "
                "read, and a folder that this user may write, on a disk with free space. Choose another with "
                "--run-dir, or free space"
            ) from error
        self.kept = kept


def _describe_config(config: JobConfig) -> dict[str, str]:
    """Return the configuration by item, without what may be each host's own."""
    values = msgspec.structs.asdict(config)
    del values["compile_cache_mib"]  # a matter of its disk
    return {f"configuration {name}": repr(value) for name, value in values.items()}


def _list_differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Return the names of items that both have, with different values.

    What only one has imported says nothing: a debugger may be among it.
    """
    return [name for name, value in mine.items() if theirs.get(name, value) != value]


def _describe_refusal(mine: ScriptRecord, job: ScriptRecord, differences: list[str]) -> str:
    named = "; ".join(
        f"{name}: found {mine.items[name]} on {mine.host}, expected {job.items[name]} as on {job.host}"
        for name in differences[:MAX_NAMED]
    )
    more = f"; and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
    if mine.agent_id == job.agent_id:
        return (
            f"host {mine.host} runs another script than its worker before. {named}{more}. The job keeps its script and "
            "its modules, but not what is installed: restore that, or end all agents of the job and start them again"
        )
    return (
        f"host {mine.host} runs another script than the job. {named}{more}. All hosts of a job must run the same "
        "script with the same arguments, modules, versions and configuration: start "
        f"{mine.host} as {job.host} was started"
    )
