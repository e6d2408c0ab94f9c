"""Checks that all hosts make before training starts: batch sizes and the newest checkpoint."""

import time
from collections.abc import Sequence

from resilient_jax.errors import CallerError, StateError
from resilient_jax.events import EventKind
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.step.assignment import ReplicaShape, count_devices_by_host
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.initial_variables import GivenLeaves
from resilient_jax.worker.world import World

LEAVING_INTERVAL_S = 0.05
"""How often to look whether hosts with other devices have left."""


def check_microbatch_size(world: World, config: FitConfig, shape: ReplicaShape) -> None:
    """Check that microbatches can be sharded evenly over the devices of a replica.

    Raises:
        CallerError: devices do not divide a microbatch; the message has the numbers.
    """
    devices = shape.count_devices(len(world.local_devices), count_devices_by_host(world.devices))
    cuts = next(iter(shape.for_host(len(world.local_devices)).mesh_axes(devices).values()))
    sizes = {"microbatch_size": config.microbatch_size}
    if config.evaluation is not None:
        size = config.evaluation.microbatch_size or config.microbatch_size
        sizes["the evaluation's microbatch_size"] = size
    for name, size in sizes.items():
        if size % cuts:
            raise CallerError(
                f"{name}: found {size} on host {world.host}, expected a multiple of {cuts}, the devices of a "
                "replica: its examples are sharded over them. Change it, or the devices per host"
            )


def require_equal_devices(world: World, why_equal: str, *, is_first: bool) -> None:
    """Let the stages of a pipeline go on if all hosts have as many devices, where they must.

    Of hosts that differ those leave that have another number than most; of two numbers as frequent, the smaller one
    leaves. The others wait until they have left, which ends the generation.

    Args:
        why_equal: why all hosts must have as many devices, and what to change; "": hosts may differ.
        is_first: whether this worker asks for the first time: the worker's agent is told to keep all devices, or none.

    Raises:
        CallerError: hosts that differ have not left in time.
    """
    if not why_equal:
        return
    numbers = count_devices_by_host(world.devices)
    found, expected = len(world.local_devices), find_most_frequent(numbers)
    is_refused = found != expected
    if is_first or is_refused:
        why = (
            f"pipeline: found {found} devices on {world.host}, expected {expected} as on most hosts: {why_equal}. Or "
            "start its agent with the same --devices-per-host"
        )
        world.record_event(
            EventKind.DEVICES_REQUIRED, found=found, expected=expected, why=why if is_refused else ""
        )
    if is_refused:
        world.step_services.end_worker()
    deadline_s = time.monotonic() + world.step_services.wait_timeout_s
    while len(set(numbers)) > 1:
        world.raise_if_ended()
        if time.monotonic() > deadline_s:
            raise CallerError(
                f"pipeline: found {', '.join(map(str, numbers))} devices on {', '.join(world.hosts)}, expected as many "
                f"on each: {why_equal}. Or start their agents with the same --devices-per-host, or leave one out"
            )
        time.sleep(LEAVING_INTERVAL_S)


def find_most_frequent(numbers: Sequence[int]) -> int:
    """Return the number that occurs most often; the largest of several.

    >>> find_most_frequent([2, 1, 2]), find_most_frequent([1, 2])
    (2, 2)
    """
    return max(set(numbers), key=lambda number: (numbers.count(number), number))


def check_batch_size(world: World, config: FitConfig, shape: ReplicaShape) -> None:
    """Check that a new job has at least one microbatch for each replica.

    Raises:
        CallerError: there are fewer microbatches than replicas; the message has the numbers.
    """
    replicas, microbatches = world.count_replicas(shape), config.recipe.num_microbatches
    if microbatches < replicas:
        size = config.microbatch_size
        raise CallerError(
            f"batch_size: found {microbatches * size}, which is {microbatches} microbatches of {size}, expected at "
            f"least one for each of the {replicas} replicas on {len(world.hosts)} hosts. Take a batch_size of "
            f"{replicas * size}, smaller microbatches, or fewer hosts"
        )


def check_initial_variables_agree(world: World, given: GivenLeaves) -> None:
    """Check that all hosts have loaded the same variables: the bits of a state are those of any host.

    Raises:
        CallerError: hosts have loaded others; the message names the hosts that differ from the first.
    """
    digests = CollectiveExchange.between_hosts(world).gather(digest_tree(given))
    others = [host for host, found in zip(world.hosts, digests, strict=True) if found != digests[0]]
    if others:
        raise CallerError(
            f"initial_variables: found other arrays on {', '.join(others)} than on {world.hosts[0]}, expected the same "
            "on every host. Copy the files to all hosts, or load them from a directory that all hosts share"
        )


def agree_on_checkpoint(world: World, found: int | None, checkpoints: Checkpoints) -> int | None:
    """Return the newest checkpoint, which must be the same on all hosts.

    Raises:
        StateError: the hosts found different ones; the message names hosts and steps.
    """
    newest = CollectiveExchange.between_hosts(world).gather(-1 if found is None else found)
    if len(set(newest)) > 1:
        seen = ", ".join(
            f"{host}: {'none' if step < 0 else f'step {step}'}"
            for host, step in zip(world.hosts, newest, strict=True)
        )
        raise StateError(
            f"checkpoints: found different newest checkpoints in {checkpoints.directory} ({seen}), expected the "
            "same on every host. Give a directory that all hosts share, or copy the newest checkpoint to all of them"
        )
    return found
