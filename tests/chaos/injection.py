"""Injects the faults that come from outside of a worker; refuses, with a reason, what this machine does not permit."""

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import assert_never

from resilient_jax.errors import CallerError
from resilient_jax.local_job.local_job import send_signal
from resilient_jax.protocol import failpoints
from tests.chaos import bit_flips, cpu_quota, resource_limits, wall_clock
from tests.chaos.active_faults import ActiveFaults
from tests.chaos.device_loss import lose_device
from tests.chaos.disk import Disk
from tests.chaos.etcd_cluster import EtcdCluster
from tests.chaos.faults import (
    BitFlip,
    ClockJump,
    DeviceLoss,
    Fault,
    Flood,
    FullDisk,
    FullMemory,
    LossyLink,
    MainThreadHang,
    NanGradients,
    NetworkPartition,
    NoDescriptors,
    Notice,
    PairPartition,
    ProcessExit,
    ProcessKill,
    ProcessStop,
    ScriptEdit,
    SilentCorruption,
    SlowDevice,
    SlowInput,
    SlowLink,
    SlowProcess,
    StuckOutput,
    UserException,
    fault_kind,
)
from tests.chaos.network import Network
from tests.chaos.output_copy import OutputCopy
from tests.chaos.strangers import flood_ports

EDITED_SCRIPT = 'raise SystemExit("a script that was edited while the job runs must not be run")\n'
NOTICE_INTERVAL_S = 0.1
"""Between two signals of a notice: schedulers send them 0.02 to 0.4 s apart."""


class FaultUnsupported(Exception):
    """The error of a fault that cannot be injected on this machine; the message is a complete line for people."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultEnvironment:
    """What faults need besides processes.

    Attributes:
        store: the cluster that was started as the job's store; None if the store is another.
        is_store_foreign: the job's store is a cluster that no campaign may break.
        network: the network of the job's hosts, and of the store's members; None if they have no namespaces.
        disk: the run folder's separate disk; None if the run folder is on a disk of the machine.
        checkpoint_root: the folder to which the paths of bit flips are relative.
        run_directory: of the job.
        output: the reader of what `launch` prints; None if it prints elsewhere.
        script: the file that the job was started with; None if it is not the campaign's own copy.
    """

    network: Network | None
    disk: Disk | None
    checkpoint_root: Path
    run_directory: Path
    output: OutputCopy | None = None
    script: Path | None = None
    store: EtcdCluster | None = None
    is_store_foreign: bool = False


def get_worker_action(fault: Fault) -> failpoints.FailPointAction | None:
    """Return the action of a worker at its failpoint; None for a fault that comes from outside."""
    match fault:
        case ProcessExit(code=code):
            return failpoints.ExitAction(exit_code=code)
        case UserException():
            return failpoints.RaiseAction(message="an error in a step, injected by the chaos campaign")
        case MainThreadHang(duration_s=duration_s):
            return failpoints.HangAction(duration_s=duration_s)
        case SlowInput(delay_s=delay_s):
            return failpoints.DelayAction(delay_s=delay_s)
        case SlowDevice(factor=factor):
            return failpoints.SlowDeviceAction(factor=factor)
        case SilentCorruption(is_repeated=is_repeated):
            return failpoints.FlipBitAction(is_repeated=is_repeated)
        case NanGradients() | BitFlip(region="message"):
            return failpoints.CorruptAction()
        case _:
            return None


def inject_fault(
    fault: Fault,
    hosts: Sequence[str],
    pids: Sequence[int],
    environment: FaultEnvironment,
    active_faults: ActiveFaults,
    rng: random.Random,
) -> str:
    """Inject a fault from outside of a worker, and return a line for the log.

    Args:
        fault: a fault that is not one of `WORKER_FAULTS`.
        hosts: the hosts to hit.
        pids: the processes to hit.
        environment: what faults need besides processes.
        active_faults: the registry that will undo the fault.
        rng: draws the bits to flip.

    Raises:
        FaultUnsupported: this machine does not permit the fault, or there is nothing to corrupt.
    """
    try:
        undo, line = _inject(fault, hosts, pids, environment, rng)
    except (OSError, CallerError) as error:
        raise FaultUnsupported(f"{fault_kind(fault)}: {error}") from error
    for one in undo:
        active_faults.add(
            one,
            after_s=getattr(fault, "duration_s", None),
            until=getattr(fault, "until_event", None),
        )
    return line


_Undo = list[Callable[[], None]]


def _inject(
    fault: Fault, hosts: Sequence[str], pids: Sequence[int], environment: FaultEnvironment, rng: random.Random
) -> tuple[_Undo, str]:
    """Inject the fault, and return the functions that undo the fault and a line for the log."""
    match fault:
        case ProcessKill() | ProcessStop() | SlowProcess() | Notice() | FullMemory() | NoDescriptors():
            return _disturb_processes(fault, pids)
        case BitFlip():
            return [], _flip_bits(fault, pids, environment, rng)
        case DeviceLoss(device=device, duration_s=duration_s):
            undo = [lose_device(environment.run_directory, host, device, duration_s) for host in hosts]
            return undo, f"device {device} of {', '.join(hosts)} is out"
        case FullDisk():
            if environment.disk is None:
                raise FaultUnsupported("full_disk: the run folder has no disk of its own here")
            return [environment.disk.fill()], "the disk of the run folder is full"
        case NetworkPartition() | PairPartition() | SlowLink() | LossyLink():
            return _disturb_links(fault, hosts, environment.network)
        case Flood() | StuckOutput() | ScriptEdit():
            return _disturb_surroundings(fault, pids, environment, rng)
        case ClockJump(jump_s=jump_s):
            return [wall_clock.jump_clock(jump_s)], f"the wall clock of this machine jumps by {jump_s:g} s"
        case (
            ProcessExit()
            | UserException()
            | MainThreadHang()
            | SlowInput()
            | SlowDevice()
            | NanGradients()
            | SilentCorruption()
        ):
            raise AssertionError("made by the worker itself")
        case _:
            assert_never(fault)


def _disturb_processes(
    fault: ProcessKill | ProcessStop | SlowProcess | Notice | FullMemory | NoDescriptors,
    pids: Sequence[int],
) -> tuple[_Undo, str]:
    named = list(pids)
    match fault:
        case ProcessKill():
            send_signal(pids, signal.SIGKILL)
            return [], f"SIGKILL to {named}"
        case ProcessStop():
            send_signal(pids, signal.SIGSTOP)
            return [lambda: send_signal(pids, signal.SIGCONT)], f"SIGSTOP to {named}"
        case SlowProcess(share=share):
            return [cpu_quota.limit_cpu(pid, share) for pid in pids], f"{share:.0%} of a core for {named}"
        case Notice(signal=name, times=times):
            for number in range(times):
                if number:
                    time.sleep(NOTICE_INTERVAL_S)
                send_signal(pids, signal.Signals[f"SIG{name}"])
            return [], f"SIG{name} to {named}, {times} times"
        case FullMemory():
            return [resource_limits.limit_memory(pid) for pid in pids], f"no more memory for {named}"
        case NoDescriptors():
            undo = [resource_limits.limit_descriptors(pid) for pid in pids]
            return undo, f"no more descriptors for {named}"
        case _:
            assert_never(fault)


def _disturb_surroundings(
    fault: Flood | StuckOutput | ScriptEdit,
    pids: Sequence[int],
    environment: FaultEnvironment,
    rng: random.Random,
) -> tuple[_Undo, str]:
    match fault:
        case Flood(connections=connections):
            undo = flood_ports(pids, connections, rng)
            return [undo], f"{connections} strangers at the ports of {list(pids)}"
        case StuckOutput():
            if environment.output is None:
                raise FaultUnsupported("stuck_output: the output is not the campaign's")
            return [environment.output.hold()], "nobody reads the output"
        case ScriptEdit():
            if environment.script is None:
                raise FaultUnsupported("edit_script: the script is not the campaign's own copy")
            environment.script.write_text(EDITED_SCRIPT)
            return [], f"{environment.script} is overwritten"
        case _:
            assert_never(fault)


def _disturb_links(
    fault: NetworkPartition | PairPartition | SlowLink | LossyLink,
    hosts: Sequence[str],
    network: Network | None,
) -> tuple[_Undo, str]:
    if network is None:
        raise FaultUnsupported(f"{fault_kind(fault)}: the hosts have no network namespaces here")
    named = ", ".join(hosts)
    match fault:
        case NetworkPartition():
            return [network.cut_link(host) for host in hosts], f"the link of {named} is down"
        case PairPartition():
            return [network.cut_pair(*hosts)], f"{named} cannot reach each other"
        case SlowLink(mbit_per_s=rate):
            return [network.throttle_link(host, rate) for host in hosts], f"{rate:g} Mbit/s for {named}"
        case LossyLink(percent=percent):
            return [network.drop_packets(host, percent) for host in hosts], f"{percent:g} % lost by {named}"
        case _:
            assert_never(fault)


def _flip_bits(fault: BitFlip, pids: Sequence[int], environment: FaultEnvironment, rng: random.Random) -> str:
    if fault.region == "checkpoint":
        path = bit_flips.flip_checkpoint_bits(environment.checkpoint_root / fault.path, fault.count, rng)
        return f"{fault.count} bits in {path}"
    steps = [bit_flips.flip_snapshot_bits(pid, fault.region, fault.count, rng) for pid in pids]
    return f"{fault.count} bits in the {fault.region} of the snapshot of step {steps} in {list(pids)}"
