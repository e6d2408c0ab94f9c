"""Where a job's records lie in the store."""

from resilient_jax.ids import HostName, JobName


def job_key(job: JobName) -> str:
    """The `JobRecord`."""
    return f"/{job}/job"


def leader_key(job: JobName) -> str:
    """The `LeaderRecord`."""
    return f"/{job}/leader"


def generation_key(job: JobName) -> str:
    """The `Generation`."""
    return f"/{job}/generation"


def hosts_prefix(job: JobName) -> str:
    """All `HostStatus` records."""
    return f"/{job}/hosts/"


def host_key(job: JobName, host: HostName) -> str:
    """One host's `HostStatus`."""
    return f"{hosts_prefix(job)}{host}"
