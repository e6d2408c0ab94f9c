"""The store's keys of a job's records."""

from resilient_jax.ids import HostName, JobName


def make_job_key(job: JobName) -> str:
    """Return the key of the `JobRecord`."""
    return f"/{job}/job"


def make_script_key(job: JobName) -> str:
    """Return the key of the `ScriptRecord`."""
    return f"/{job}/script"


def make_leader_key(job: JobName) -> str:
    """Return the key of the `LeaderRecord`."""
    return f"/{job}/leader"


def make_generation_key(job: JobName) -> str:
    """Return the key of the `Generation`."""
    return f"/{job}/generation"


def make_change_key(job: JobName) -> str:
    """Return the key of the `GenerationChange` that led to the `Generation`."""
    return f"/{job}/change"


def make_quarantine_prefix(job: JobName) -> str:
    """Return the prefix of all `QuarantineRecord` keys."""
    return f"/{job}/quarantine/"


def make_quarantine_key(job: JobName, host: HostName) -> str:
    """Return the key of one host's `QuarantineRecord`."""
    return f"{make_quarantine_prefix(job)}{host}"


def make_devices_prefix(job: JobName, host: HostName | None = None) -> str:
    """Return the prefix of the `DeviceQuarantineRecord` keys of a host; None: of all hosts."""
    return f"/{job}/devices/" + (f"{host}/" if host is not None else "")


def make_device_key(job: JobName, host: HostName, device: int) -> str:
    """Return the key of one device's `DeviceQuarantineRecord`."""
    return f"{make_devices_prefix(job, host)}{device}"


def make_replacement_key(job: JobName) -> str:
    """Return the key that the host has whose worker is started again with other devices: one at a time."""
    return f"/{job}/replacement"


def make_losses_prefix(job: JobName) -> str:
    """Return the prefix of all `HostLosses` keys."""
    return f"/{job}/losses/"


def make_losses_key(job: JobName, host: HostName) -> str:
    """Return the key of one host's `HostLosses`."""
    return f"{make_losses_prefix(job)}{host}"


def make_hosts_prefix(job: JobName) -> str:
    """Return the prefix of all `HostStatus` keys."""
    return f"/{job}/hosts/"


def make_host_key(job: JobName, host: HostName) -> str:
    """Return the key of one host's `HostStatus`."""
    return f"{make_hosts_prefix(job)}{host}"
