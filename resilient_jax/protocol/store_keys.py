"""Where a job's records lie in the store."""

from resilient_jax.ids import HostName, JobName


def make_job_key(job: JobName) -> str:
    """The `JobRecord`."""
    return f"/{job}/job"


def make_leader_key(job: JobName) -> str:
    """The `LeaderRecord`."""
    return f"/{job}/leader"


def make_generation_key(job: JobName) -> str:
    """The `Generation`."""
    return f"/{job}/generation"


def make_hosts_prefix(job: JobName) -> str:
    """All `HostStatus` records."""
    return f"/{job}/hosts/"


def make_host_key(job: JobName, host: HostName) -> str:
    """One host's `HostStatus`."""
    return f"{make_hosts_prefix(job)}{host}"
