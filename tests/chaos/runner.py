"""Sets up what a campaign needs on this machine (a network, a disk, the job's process), and runs the campaign."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from resilient_jax.jax_runtime.worker_environment import DEVICE_COUNT_FLAG, has_device_count, set_device_count
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.observed_job import JobObserver
from resilient_jax.protocol.ledger import LEDGER_VARIABLE
from tests.chaos.active_faults import ActiveFaults
from tests.chaos.campaign import Campaign, CampaignResult
from tests.chaos.disk import Disk, mount_disk
from tests.chaos.etcd_cluster import LOOPBACK_SITES, EtcdCluster
from tests.chaos.faults import ScriptEdit
from tests.chaos.injection import FaultEnvironment
from tests.chaos.ledgers import tail_ledger
from tests.chaos.manifest import STORE_MEMBERS, CampaignManifest, expand_command
from tests.chaos.manifest_toml import format_manifest, format_table
from tests.chaos.network import Network, build_network
from tests.chaos.output_copy import OutputCopy
from tests.chaos.reference_run import STOP_STEP_VARIABLE, ReferenceRun

MAX_HOST_RESTARTS = 10_000
REFERENCE_STEPS = 200
"""Steps of the first reference run: enough for a short campaign."""
REPORT_INTERVAL_S = 0.1
"""Time between two polls of the store: each takes 9 ms of processor time from the job."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSetup:
    """The script of a campaign, and its folders.

    Attributes:
        command: the script and its arguments, as in `CampaignManifest.script`.
        directory: the folder of all files of the campaign.
        compile_cache: JAX's persistent compilation cache, shared by all runs.
        reference_directory: the folder of the reference run, shared by campaigns of the same script.
        store: URL of an etcd cluster as the job's store, which no fault breaks; None: the manifest's.
        store_tls: folder with certificates for that cluster.
    """

    command: tuple[str, ...]
    directory: Path
    compile_cache: Path
    reference_directory: Path
    store: str | None = None
    store_tls: Path | None = None


def run_campaign(
    manifest: CampaignManifest, setup: CampaignSetup, log: Callable[[str], None]
) -> CampaignResult:
    """Run the job under the campaign until the job ends, and return the outcome.

    Raises:
        CallerError: the script fails even without faults, or the store's program is not installed.
    """
    directory = setup.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.toml").write_text(format_manifest(manifest))
    devices = manifest.job.devices_per_host
    environment = make_environment(devices, setup.compile_cache, os.environ)
    if has_device_count(os.environ):
        log(f"{DEVICE_COUNT_FLAG} in XLA_FLAGS is ignored: {devices} devices per host, as the manifest says")
    reference = ReferenceRun(setup.command, setup.reference_directory, environment, manifest.job)
    reference.extend_to(manifest.job.steps or REFERENCE_STEPS)
    with contextlib.ExitStack() as stack:
        network = _enter_network(stack, manifest, log)
        store = _enter_store(stack, manifest, directory, network)
        disk = _enter_disk(stack, manifest, directory / "run", log)
        active_faults = ActiveFaults()
        stop_file, ledger = directory / "stop", directory / "ledger"
        command = expand_command(setup.command, directory)
        script = _copy_script(manifest, command[0], directory)
        output = stack.enter_context(OutputCopy(directory / "run" / "launch.out"))
        job = stack.enter_context(
            LocalJob(
                command if script is None else [str(script), *command[1:]],
                num_hosts=manifest.job.hosts,
                run_directory=directory / "run",
                options=[*_make_options(manifest, directory, network), *_make_store_options(setup, store)],
                environment={
                    **environment,
                    **manifest.job.environment,
                    LEDGER_VARIABLE: str(ledger),
                    STOP_STEP_VARIABLE: str(stop_file),
                },
                output=output.writer,
                observer=JobObserver(
                    on_events=active_faults.observe_events, report_interval_s=REPORT_INTERVAL_S
                ),
            )
        )
        output.close_writer()
        around = FaultEnvironment(
            network=network,
            disk=disk,
            checkpoint_root=directory,
            run_directory=directory / "run",
            output=output,
            script=script,
            store=store,
            is_store_foreign=setup.store is not None,
        )
        campaign = Campaign(
            manifest, job, tail_ledger(ledger), active_faults, reference, around, stop_file, log
        )
        result = campaign.run()
    samples = (msgspec.json.encode(sample) + b"\n" for sample in result.samples)
    (directory / "samples.jsonl").write_bytes(b"".join(samples))
    return result


def _copy_script(manifest: CampaignManifest, script: str, directory: Path) -> Path | None:
    """Return a copy of the script that an incident is to overwrite; None if none is."""
    if not any(isinstance(incident.fault, ScriptEdit) for incident in manifest.incidents):
        return None
    return Path(shutil.copy(script, directory / Path(script).name))


def make_environment(devices: int, compile_cache: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the script, in the job and in the reference run.

    Both have the same XLA flags, because these flags change what the script computes.

    Args:
        devices: devices per host; replaces the number in `base`, if any.
        compile_cache: JAX's persistent compilation cache.
        base: the environment of this process.
    """
    return {
        **base,
        "OMP_NUM_THREADS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache.absolute()),
        "XLA_FLAGS": set_device_count(base.get("XLA_FLAGS", ""), devices),
    }


def _make_options(manifest: CampaignManifest, directory: Path, network: Network | None) -> list[str]:
    config = directory / "job.toml"
    config.write_text(format_table(manifest.job.job_config))
    options = ["--config", str(config), "--devices-per-host", str(manifest.job.devices_per_host)]
    options += ["--max-host-restarts", str(MAX_HOST_RESTARTS)]
    if not manifest.job.forks_workers:
        options += ["--zygote", "host"]
    if network is not None:
        sites = directory / "sites.toml"
        sites.write_text(_format_sites(network))
        options += ["--sites", str(sites)]
    return options


def _make_store_options(setup: CampaignSetup, store: EtcdCluster | None) -> list[str]:
    address = setup.store if store is None else f"{store.address}/chaos"
    options = ["--store", address] if address is not None else []
    return options + (["--store-tls", str(setup.store_tls)] if setup.store_tls is not None else [])


def _format_sites(network: Network) -> str:
    tables = [
        f"[[sites]]\naddress = {json.dumps(site.address)}\ncommand_prefix = {json.dumps(site.command_prefix)}\n"
        for site in network.sites()
    ]
    return f"store_host = {json.dumps(network.gateway)}\n" + "\n".join(tables)


def _enter_network(
    stack: contextlib.ExitStack, manifest: CampaignManifest, log: Callable[[str], None]
) -> Network | None:
    if manifest.job.network != "namespaces":
        return None
    try:
        members = STORE_MEMBERS if manifest.job.store == "etcd" else ()
        return stack.enter_context(build_network(manifest.job.hosts, members))
    except OSError as error:
        log(f"skipped: no network namespaces here, so the hosts have no links to break: {error}")
        return None


def _enter_store(
    stack: contextlib.ExitStack, manifest: CampaignManifest, directory: Path, network: Network | None
) -> EtcdCluster | None:
    if manifest.job.store != "etcd":
        return None
    folder = directory / "etcd"
    folder.mkdir(exist_ok=True)
    cluster = EtcdCluster(folder, sites=network.store_sites() if network is not None else LOOPBACK_SITES)
    return stack.enter_context(cluster)


def _enter_disk(
    stack: contextlib.ExitStack, manifest: CampaignManifest, folder: Path, log: Callable[[str], None]
) -> Disk | None:
    if not manifest.job.disk_mib:
        return None
    try:
        return stack.enter_context(mount_disk(folder, manifest.job.disk_mib))
    except OSError as error:
        log(f"skipped: no separate disk for the run folder here: {error}")
        return None
