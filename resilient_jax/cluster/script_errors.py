"""The errors of a job's scripts, host by host, from the event logs of a run directory."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from resilient_jax.cluster.run_directory import HostLog, make_log_path
from resilient_jax.errors import MessageError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.telemetry.event_log import read_events


def read_script_errors(directory: Path, hosts: Iterable[HostName], since_s: float) -> dict[HostName, str]:
    """Return the newest error of each host's script, with its complete traceback.

    Args:
        since_s: time of day, in seconds since 1970, of the job's start; an earlier job may have run in the directory.
    """
    errors: dict[HostName, str] = {}
    for host in hosts:
        with contextlib.suppress(OSError, MessageError):  # a full disk or a damaged log hides no outcome
            for event in read_events(make_log_path(directory, host, HostLog.EVENTS)):
                if event.kind is EventKind.SCRIPT_FAILED and event.wall_s >= since_s:
                    errors[host] = str(event.detail["error"])
    return errors
