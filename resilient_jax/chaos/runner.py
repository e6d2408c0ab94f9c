"""Sets up what a campaign needs on this machine (a network, a disk, the job's process), and runs it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from resilient_jax.chaos.active_faults import ActiveFaults
from resilient_jax.chaos.campaign import Campaign, CampaignResult
from resilient_jax.chaos.disk import Disk, mount_disk
from resilient_jax.chaos.injection import FaultEnvironment
from resilient_jax.chaos.job_monitor import JobMonitor
from resilient_jax.chaos.log_tail import tail_events, tail_ledger
from resilient_jax.chaos.manifest import CampaignManifest, expand_command
from resilient_jax.chaos.manifest_toml import format_manifest, format_table
from resilient_jax.chaos.network import Network, build_network
from resilient_jax.chaos.reference_run import STOP_STEP_VARIABLE, ReferenceRun
from resilient_jax.cluster.local_job import LocalJob
from resilient_jax.jax_runtime.worker_environment import DEVICE_COUNT_FLAG, has_device_count, set_device_count
from resilient_jax.protocol.ledger import LEDGER_VARIABLE

HOST_RESTART_LIMIT = 10_000
REFERENCE_STEPS = 200
"""Of the undisturbed run at first: enough for a short campaign."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSetup:
    """Where and how a campaign runs.

    Attributes:
        command: the script and its arguments, as in `Manifest.script`.
        directory: for everything that is written.
        cache: JAX's persistent compilation cache, shared by all runs.
        reference: folder of the undisturbed run, shared by campaigns of the same script.
    """

    command: tuple[str, ...]
    directory: Path
    compile_cache: Path
    reference_directory: Path


def run_campaign(
    manifest: CampaignManifest, setting: CampaignSetup, say: Callable[[str], None]
) -> CampaignResult:
    """Runs the job under the campaign, to its end.

    Raises:
        CallerError: the script does not even work undisturbed.
    """
    directory = setting.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.toml").write_text(format_manifest(manifest))
    devices = manifest.job.devices_per_host
    environment = make_environment(devices, setting.compile_cache, os.environ)
    if has_device_count(os.environ):
        say(
            f"{DEVICE_COUNT_FLAG} in XLA_FLAGS does not count: {devices} devices per host, as the manifest says"
        )
    reference = ReferenceRun(setting.command, setting.reference_directory, environment)
    reference.extend_to(manifest.job.steps or REFERENCE_STEPS)
    with contextlib.ExitStack() as stack:
        network = _enter_network(stack, manifest, say)
        disk = _enter_disk(stack, manifest, directory / "run", say)
        lifetimes = ActiveFaults()
        end, ledger = directory / "end", directory / "ledger"
        job = stack.enter_context(
            LocalJob(
                expand_command(setting.command, directory),
                num_hosts=manifest.job.hosts,
                run_directory=directory / "run",
                options=_options(manifest, directory, network),
                environment={**environment, LEDGER_VARIABLE: str(ledger), STOP_STEP_VARIABLE: str(end)},
            )
        )
        watch = JobMonitor(job, tail_events(job.run_directory), tail_ledger(ledger), lifetimes)
        around = FaultEnvironment(network=network, disk=disk, checkpoint_root=directory)
        findings = Campaign(manifest, watch, lifetimes, reference, around, end, say).run()
    (directory / "samples.jsonl").write_bytes(
        b"".join(msgspec.json.encode(s) + b"\n" for s in findings.samples)
    )
    return findings


def make_environment(devices: int, cache: Path, base: Mapping[str, str]) -> dict[str, str]:
    """What the script gets in the job and undisturbed: the same flags of XLA, for they change what it computes.

    Args:
        devices: per host; a number of them in `base` gives way to the manifest's.
        cache: JAX's persistent compilation cache.
        base: the environment of this process.
    """
    return {
        **base,
        "OMP_NUM_THREADS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache.absolute()),
        "XLA_FLAGS": set_device_count(base.get("XLA_FLAGS", ""), devices),
    }


def _options(manifest: CampaignManifest, directory: Path, network: Network | None) -> list[str]:
    config = directory / "job.toml"
    config.write_text(format_table(manifest.job.job_config))
    options = ["--config", str(config), "--devices-per-host", str(manifest.job.devices_per_host)]
    options += ["--host-restart-limit", str(HOST_RESTART_LIMIT)]
    if network is not None:
        sites = directory / "sites.toml"
        sites.write_text(_write_sites(network))
        options += ["--sites", str(sites)]
    return options


def _write_sites(network: Network) -> str:
    tables = [
        f"[[sites]]\naddress = {json.dumps(site.address)}\nprefix = {json.dumps(site.command_prefix)}\n"
        for site in network.sites()
    ]
    return f"store_host = {json.dumps(network.gateway)}\n" + "\n".join(tables)


def _enter_network(
    stack: contextlib.ExitStack, manifest: CampaignManifest, say: Callable[[str], None]
) -> Network | None:
    if manifest.job.network != "namespaces":
        return None
    try:
        return stack.enter_context(build_network(manifest.job.hosts))
    except OSError as error:
        say(f"skipped: no network namespaces here, so the hosts have no links to break: {error}")
        return None


def _enter_disk(
    stack: contextlib.ExitStack, manifest: CampaignManifest, folder: Path, say: Callable[[str], None]
) -> Disk | None:
    if not manifest.job.disk_mib:
        return None
    try:
        return stack.enter_context(mount_disk(folder, manifest.job.disk_mib))
    except OSError as error:
        say(f"skipped: no disk of its own for the run folder here: {error}")
        return None
