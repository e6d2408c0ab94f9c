"""Sets up what a campaign needs on this machine (a network, a disk, the job's process), and runs it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from resilient_jax.chaos.active_faults import Lifetimes
from resilient_jax.chaos.campaign import Campaign, Findings
from resilient_jax.chaos.disk import Disk, mounted
from resilient_jax.chaos.injection import Surroundings
from resilient_jax.chaos.job_monitor import Watch
from resilient_jax.chaos.log_tail import tail_events, tail_ledger
from resilient_jax.chaos.manifest import Manifest, fill_in
from resilient_jax.chaos.manifest_toml import write_manifest, write_table
from resilient_jax.chaos.network import Network, built
from resilient_jax.chaos.reference_run import END_VARIABLE, Reference
from resilient_jax.cluster.local_job import LocalJob
from resilient_jax.jax_runtime.worker_environment import DEVICE_COUNT_FLAG, has_device_count, set_device_count
from resilient_jax.protocol.ledger import LEDGER_VARIABLE

HOST_RESTART_LIMIT = 10_000
REFERENCE_STEPS = 200
"""Of the undisturbed run at first: enough for a short campaign."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how a campaign runs.

    Attributes:
        command: the script and its arguments, as in `Manifest.script`.
        directory: for everything that is written.
        cache: JAX's persistent compilation cache, shared by all runs.
        reference: folder of the undisturbed run, shared by campaigns of the same script.
    """

    command: tuple[str, ...]
    directory: Path
    cache: Path
    reference: Path


def run_campaign(manifest: Manifest, setting: Setting, say: Callable[[str], None]) -> Findings:
    """Runs the job under the campaign, to its end.

    Raises:
        CallerError: the script does not even work undisturbed.
    """
    directory = setting.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.toml").write_text(write_manifest(manifest))
    devices = manifest.job.devices_per_host
    environment = run_environment(devices, setting.cache, os.environ)
    if has_device_count(os.environ):
        say(
            f"{DEVICE_COUNT_FLAG} in XLA_FLAGS does not count: {devices} devices per host, as the manifest says"
        )
    reference = Reference(setting.command, setting.reference, environment)
    reference.reach(manifest.job.steps or REFERENCE_STEPS)
    with contextlib.ExitStack() as stack:
        network = _enter_network(stack, manifest, say)
        disk = _enter_disk(stack, manifest, directory / "run", say)
        lifetimes = Lifetimes()
        end, ledger = directory / "end", directory / "ledger"
        job = stack.enter_context(
            LocalJob(
                fill_in(setting.command, directory),
                num_hosts=manifest.job.hosts,
                run_directory=directory / "run",
                options=_options(manifest, directory, network),
                environment={**environment, LEDGER_VARIABLE: str(ledger), END_VARIABLE: str(end)},
            )
        )
        watch = Watch(job, tail_events(job.run_directory), tail_ledger(ledger), lifetimes)
        around = Surroundings(network=network, disk=disk, checkpoints=directory)
        findings = Campaign(manifest, watch, lifetimes, reference, around, end, say).run()
    (directory / "samples.jsonl").write_bytes(
        b"".join(msgspec.json.encode(s) + b"\n" for s in findings.samples)
    )
    return findings


def run_environment(devices: int, cache: Path, base: Mapping[str, str]) -> dict[str, str]:
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


def _options(manifest: Manifest, directory: Path, network: Network | None) -> list[str]:
    config = directory / "job.toml"
    config.write_text(write_table(manifest.job.settings))
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
    stack: contextlib.ExitStack, manifest: Manifest, say: Callable[[str], None]
) -> Network | None:
    if manifest.job.network != "namespaces":
        return None
    try:
        return stack.enter_context(built(manifest.job.hosts))
    except OSError as error:
        say(f"skipped: no network namespaces here, so the hosts have no links to break: {error}")
        return None


def _enter_disk(
    stack: contextlib.ExitStack, manifest: Manifest, folder: Path, say: Callable[[str], None]
) -> Disk | None:
    if not manifest.job.disk_mib:
        return None
    try:
        return stack.enter_context(mounted(folder, manifest.job.disk_mib))
    except OSError as error:
        say(f"skipped: no disk of its own for the run folder here: {error}")
        return None
