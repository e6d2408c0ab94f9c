"""Lets a worker join only with the script that the job's other hosts run.

The first worker that is ready describes its script in the store, and the others compare theirs with it. That
description stands as long as a host with this script lives: a job whose hosts have all ended can be started again with
a script that was mended.
"""

import hashlib

import msgspec

from resilient_jax.cluster.stored_records import ENCODER, decode_host_status, decode_script_record
from resilient_jax.config import JobConfig
from resilient_jax.errors import ScriptRefused
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.job_records import ScriptRecord
from resilient_jax.protocol.store_keys import make_hosts_prefix, make_script_key
from resilient_jax.store.interface import (
    PutOp,
    RangeOp,
    RangeResponse,
    Store,
    require_absent,
    require_unchanged,
)

MAX_NAMED = 4
"""Differences that an error gives with both values; one library of another version may change many modules."""


class ScriptAdmission:
    """The comparison of this host's script with that of the job.

    Args:
        store: of the job.
        job: its name.
        host: this one.
        agent_id: of this host's agent.
        config: as this host was given it.

    Attributes:
        digest: of the script with which this host's worker was let in; empty before.
    """

    def __init__(self, store: Store, job: JobName, host: HostName, agent_id: str, config: JobConfig) -> None:
        self._store = store
        self._job = job
        self._host = host
        self._agent_id = agent_id
        self._config = config
        self.digest = ""
        self._admitted: dict[str, str] | None = None

    async def admit(self, script: dict[str, str]) -> None:
        """Return if the hosts of the job run this script.

        Args:
            script: as `describe_script` returns it.

        Raises:
            ScriptRefused: they run another; the message has both values of what differs.
            PeerUnreachable: the store does not answer.
        """
        key, items = make_script_key(self._job), {**script, **_describe_config(self._config)}
        mine = ScriptRecord(host=self._host, agent_id=self._agent_id, items=items)
        put = PutOp(key, ENCODER.encode(mine))
        expected = require_absent(key)
        while True:
            result = await self._store.transaction([expected], [put], [RangeOp(key)])
            if result.succeeded:
                break
            read = result.responses[0]
            assert isinstance(read, RangeResponse), "the failure operation is a range"
            if not read.key_values:  # deleted meanwhile
                expected = require_absent(key)
                continue
            job = decode_script_record(read.key_values[0])
            differences = _list_differences(items, job.items)
            if not differences:
                break
            if await self._is_in_use(job):
                raise ScriptRefused(_describe_refusal(mine, job, differences))
            expected = require_unchanged(read.key_values[0])
        self.digest = digest_script(items)
        self._admitted = script

    def find_difference(self, script: dict[str, str]) -> str:
        """Return how a standby's script differs from that of this host's worker; empty: it does not."""
        if self._admitted is None:
            return "no worker was let in"
        differences = _list_differences(script, self._admitted)
        return f"found another {', '.join(differences[:MAX_NAMED])} than the worker's" if differences else ""

    async def _is_in_use(self, job: ScriptRecord) -> bool:
        """Return whether another living host runs the job's script, or has described it and is about to."""
        _, found = await self._store.range(make_hosts_prefix(self._job))
        others = [decode_host_status(stored) for stored in found]
        digest = digest_script(job.items)
        return any(
            other.agent_id == job.agent_id or other.script == digest
            for other in others
            if other.agent_id != self._agent_id
        )


def digest_script(items: dict[str, str]) -> str:
    """Return a digest of all items of a script."""
    return hashlib.sha256(repr(sorted(items.items())).encode()).hexdigest()[:16]


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
    return (
        f"host {mine.host} runs another script than the job. {named}{more}. All hosts of a job must run the same "
        "script with the same arguments, modules, versions and configuration: start "
        f"{mine.host} as {job.host} was started"
    )
