"""Does to a running job what an incident says. What this machine does not permit is refused with the reason."""

import dataclasses
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import assert_never

from resilient_jax.chaos import bit_flips, cpu_quota, resource_limits, wall_clock
from resilient_jax.chaos.active_faults import ActiveFaults
from resilient_jax.chaos.disk import Disk
from resilient_jax.chaos.faults import (
    BitFlip,
    ClockJump,
    Fault,
    FullDisk,
    FullMemory,
    LossyLink,
    MainThreadHang,
    NanGradients,
    NetworkPartition,
    NoDescriptors,
    ProcessExit,
    ProcessKill,
    ProcessStop,
    SlowLink,
    SlowProcess,
    UserException,
    fault_kind,
)
from resilient_jax.chaos.network import Network
from resilient_jax.chaos.signals import resume_processes, send_signal
from resilient_jax.errors import CallerError
from resilient_jax.protocol import failpoints


class FaultUnsupported(Exception):
    """This machine cannot do that; the text is a whole line for people."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultEnvironment:
    """What faults need besides processes.

    Attributes:
        network: of the job's hosts; None if they have no namespaces.
        disk: that the run folder is on; None if it is on the machine's.
        checkpoints: what relative paths of a flip begin at.
    """

    network: Network | None
    disk: Disk | None
    checkpoint_root: Path


def get_worker_action(fault: Fault) -> failpoints.FailPointAction | None:
    """What a process does by itself at its place; None for a fault that comes from outside."""
    match fault:
        case ProcessExit(code=code):
            return failpoints.ExitAction(exit_code=code)
        case UserException():
            return failpoints.RaiseAction(message="an error in a step, made by the chaos campaign")
        case MainThreadHang(duration_s=duration_s):
            return failpoints.HangAction(duration_s=duration_s)
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
    """Does it now; gives what there is to say of it.

    Args:
        fault: from outside.
        hosts: that are hit.
        pids: processes that are hit.
        around: what is not a process.
        lifetimes: what will end it.
        chance: for what is left to chance.

    Raises:
        Skipped: not on this machine, or there is nothing to do it to.
    """
    try:
        undo, text = _do(fault, hosts, pids, environment, rng)
    except (OSError, CallerError) as error:
        raise FaultUnsupported(f"{fault_kind(fault)}: {error}") from error
    for one in undo:
        active_faults.add(
            one, after_s=getattr(fault, "duration_s", None), until=getattr(fault, "until_event", None)
        )
    return text


def _do(
    fault: Fault, hosts: Sequence[str], pids: Sequence[int], around: FaultEnvironment, chance: random.Random
) -> tuple[list[Callable[[], None]], str]:
    """What undoes it, and what there is to say."""
    match fault:
        case ProcessKill():
            send_signal(pids, signal.SIGKILL)
            return [], f"SIGKILL to {list(pids)}"
        case ProcessStop():
            send_signal(pids, signal.SIGSTOP)
            return [lambda: resume_processes(pids)], f"SIGSTOP to {list(pids)}"
        case SlowProcess(share=share):
            return [
                cpu_quota.limit_cpu(pid, share) for pid in pids
            ], f"{share:.0%} of a core for {list(pids)}"
        case FullMemory():
            return [resource_limits.limit_memory(pid) for pid in pids], f"no more memory for {list(pids)}"
        case NoDescriptors():
            return [
                resource_limits.limit_descriptors(pid) for pid in pids
            ], f"no more descriptors for {list(pids)}"
        case BitFlip():
            return [], _flip(fault, pids, around, chance)
        case FullDisk():
            if around.disk is None:
                raise FaultUnsupported("full_disk: the run folder has no disk of its own here")
            return [around.disk.fill()], "the disk of the run folder is full"
        case NetworkPartition() | SlowLink() | LossyLink():
            return _disturb_links(fault, hosts, around.network)
        case ClockJump(jump_s=seconds):
            return [wall_clock.jump_clock(seconds)], f"the wall clock of this machine jumps by {seconds:g} s"
        case ProcessExit() | UserException() | MainThreadHang() | NanGradients():
            raise AssertionError("made by the worker itself")
        case _:
            assert_never(fault)


def _disturb_links(
    fault: NetworkPartition | SlowLink | LossyLink, hosts: Sequence[str], network: Network | None
) -> tuple[list[Callable[[], None]], str]:
    if network is None:
        raise FaultUnsupported(f"{fault_kind(fault)}: the hosts have no network namespaces here")
    match fault:
        case NetworkPartition():
            return [network.cut_link(host) for host in hosts], f"the link of {', '.join(hosts)} is down"
        case SlowLink(mbit_per_s=mbit_s):
            return [
                network.throttle_link(h, mbit_s) for h in hosts
            ], f"{mbit_s:g} Mbit/s for {', '.join(hosts)}"
        case LossyLink(percent=percent):
            return [
                network.drop_packets(h, percent) for h in hosts
            ], f"{percent:g} % lost by {', '.join(hosts)}"
        case _:
            assert_never(fault)


def _flip(fault: BitFlip, pids: Sequence[int], around: FaultEnvironment, chance: random.Random) -> str:
    if fault.region == "checkpoint":
        path = bit_flips.flip_checkpoint_bits(around.checkpoint_root / fault.path, fault.count, chance)
        return f"{fault.count} bits in {path}"
    steps = [bit_flips.flip_snapshot_bits(pid, fault.region, fault.count, chance) for pid in pids]
    return f"{fault.count} bits in the {fault.region} of the snapshot of step {steps} in {list(pids)}"
