"""What the first hosts of a job wrote of it, which every other host must fit."""

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.versions import Versions


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the first host wrote of the job; every other host must have the same versions."""

    versions: Versions
    first_host: HostName


class ScriptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The program that all hosts of a job must run.

    Attributes:
        host: the first host with a worker, which has described the script; before, the one that began the program.
        agent_id: of its agent.
        program: the id of the program, under which each host keeps the files of it.
        items: values and digests of the script, by name; empty: no worker has been let in yet.
    """

    host: HostName
    agent_id: str
    program: str
    items: dict[str, str]
