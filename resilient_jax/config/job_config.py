"""The settings of one job: timeouts, restart budgets, snapshots, and what to do when the state is lost."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
"""A positive duration of at most a day: a longer one is a mistyped unit, and `inf` would unbound a wait."""

Count = Annotated[int, Meta(ge=1, le=1_000_000)]

RESTART_WINDOW_S: Final = 600.0
"""How long a restart counts against `max_restarts`, and a loss against `max_host_losses`. A month's job is not ended by
five crashes spread over it; but so many starts of a worker that crashes at once, with their pauses, take minutes."""
STORE_TIMEOUT_LEASES: Final = 20.0
"""How many times the duration of a lease an agent tries to reach the store."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a job that is a choice and not an address.

    Every agent of a job must have the same values. Ranges are checked by `load_toml`, `decode_toml` and
    `override_values`; calling the class checks nothing.

    Example:
        >>> from resilient_jax.config import JobConfig, decode_toml
        >>> decode_toml("lease_ttl_s = 5", JobConfig, source="job.toml").lease_ttl_s
        5.0
    """

    lease_ttl_s: Seconds = 3.0
    """Seconds without a keep-alive until the store counts a host as dead. A lost host is noticed this late at worst;
    much shorter, and a busy machine's pause is taken for a death. An agent that cannot reach the store gives up after
    20 times as long: in a minute a node of the store has restarted."""

    forming_timeout_s: Seconds = 60.0
    """Seconds for all members of a new generation to connect; members that have not are left out. Covers a slow import
    and a cold file system, not a compilation."""

    quiesce_timeout_s: Seconds = 5.0
    """Seconds for a worker to leave its collectives and acknowledge a change; then it is killed. Aborting takes
    milliseconds, a long local program may have to end first."""

    collective_timeout_s: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """Seconds that a collective between CPUs, or a stage of a pipeline, waits for a peer; then it fails, and is tried
    again in a new generation. A thread that gloo keeps waiting for a dead peer ends with it, and frees its memory. Must
    be longer than any host keeps the others waiting: while it compiles, or in a callback that only it makes. On GPUs a
    program that takes twice as long ends its process."""

    hang_timeout_s: Seconds = 60.0
    """Seconds below which a step's input, computation or sum is never taken for a hang. The deadline of each is 10
    times the longest of late in this very job, if that is more. Then the host that keeps the others waiting is named,
    the stacks of all hosts are kept, and its worker is left out and started again. A worker whose guard thread sends
    nothing for so long and `quiesce_timeout_s` is killed: it is stopped or wedged, as the guard sends heartbeats even
    while XLA compiles."""

    user_code_timeout_s: Seconds = 240.0
    """The same for code of the script's own between tasks, for checkpoints, for restoring, and for what runs for the
    first time. On CPU shorter than `collective_timeout_s`, or the collectives of the hosts that wait fail first."""

    start_timeout_s: Seconds = 300.0
    """Seconds from the launch until `min_hosts` have joined; then the job ends with an error. Machines of one
    allocation start minutes apart."""

    max_restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 5
    """Restarts of one host's worker within ten minutes; after one more the host gives up and is quarantined, and
    the others continue without it. Zero: never restart."""

    max_error_restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 1
    """Restarts of one host's worker at one step after errors that its script alone raises; after one more the host is
    quarantined. What two hosts raise alike ends the job at once. Each counts against `max_restarts`, too."""

    max_host_losses: Annotated[int, Meta(ge=0, le=1_000_000)] = 5
    """Losses of one host within ten minutes, without a notice that it leaves; after one more it is quarantined,
    unless fewer than `min_hosts`, or than one replica spans, would be left."""

    quarantine_s: Seconds = 3600.0
    """Seconds for which a host takes no part that was lost too often, whose worker died too often, which is
    suspected of failed collectives, or which is slow: then twice as long each time. `resilient-jax hosts` lists such
    hosts and ends it."""

    slow_hosts: Literal["act", "report"] = "act"
    """What happens about a host that stays slow, and costs more than shares by speed give back. `act`: where that pays,
    a spare takes its place, or the others go on without it and it is quarantined, or it goes on without its slow
    devices (as `devices_after_loss` says), or a pipeline gives it fewer layers. `report`: it is named, and nothing
    else."""

    restart_backoff_s: Annotated[float, Meta(ge=0, le=3_600)] = 1.0
    """Seconds before a worker's second restart within ten minutes, doubled for each one after. The first restart is
    immediate: most crashes do not repeat."""

    standby: Literal["off", "seat"] = "off"
    """A process on each host that waits to replace the host's worker when that dies. `off`: none; a new worker is
    forked from a process that has imported its libraries, and runs the script. `seat`: it is a complete second worker
    in a spare seat of the world, with programs and memory of its own, and takes the worker's place in the next step;
    the top of the script runs a second time beside the worker."""

    abort: Literal["auto", "interrupt", "replace"] = "auto"
    """What happens to the workers of a world in which one was lost. `interrupt`: their collectives are aborted, and
    they go on in the next world. `replace`: they are killed, and the workers that replace them go on from the newest
    snapshot in memory: for accelerators whose collectives cannot be aborted. `auto`: `interrupt` with `--platform
    cpu`, the default of `launch`, else `replace`."""

    min_hosts: Count = 1
    """Hosts below which the job does not train, but waits for others to join."""

    spare_seats: Annotated[int, Meta(ge=0, le=4096)] = 32
    """How many workers may join a world while its members train, between two re-forms: a worker that comes back takes
    such a seat, and the others keep their processes, arrays and programs. Each costs 1 MiB on the leader's host while
    the world is formed. On CPU only."""

    live_nodes: Literal["auto", "on", "off"] = "auto"
    """Whether all members of a generation meet in JAX's coordination service before their first collective, and the
    service is told of each member that is given up: XLA aborts NCCL's collectives by that. `auto`: unless the workers
    train on CPU, where gloo's connections are shut instead."""

    max_collective_retries: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    """New generations at one step after failed collectives in which no host died. Then the host that reported most of
    them is quarantined; if that does not help, the error is taken for the user's own and ends the job."""

    snapshot_parity: Annotated[int, Meta(ge=0, le=254)] = 1
    """How many hosts of a group may be lost at once without losing a snapshot in memory. Each costs about 1/(group -
    parity) of a snapshot's memory more."""

    snapshot_interval_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["auto"] = 1
    """Steps between two snapshots that the training asks for, as it does where a state is sharded over hosts; `auto`:
    from what one costs and how often hosts of this job fail (Young and Daly)."""

    replicated_snapshot_interval_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["auto", "off"] = (
        "auto"
    )
    """Steps between two snapshots of a state that every host has all of, so that it outlives the death of all workers
    at once. `auto`: as often as costs 2 % of the time at most, measured in each generation, or more often where this
    job's failures would cost more; `off`: none."""

    compile_cache_mib: Annotated[int, Meta(ge=16, le=1_048_576)] = 4096
    """MiB of compiled programs that a host keeps in its run directory, for workers that rejoin and for the plans that
    may be next. The least recently used are evicted first."""

    snapshot_group_size: Annotated[int, Meta(ge=2, le=255)] = 8
    """Hosts that keep parity for each other, at most. Larger groups take less memory for the same parity, and lose
    everything with fewer failures in all."""

    audit_share: Annotated[float, Meta(ge=0, le=1)] = 0.001
    """Share of microbatches that two hosts compute, to find a host that computes wrongly without failing; steps take
    longer by this share. With 0 there are no audits."""

    gpu_health: Literal["act", "report", "off"] = "act"
    """What agents do about GPUs that NVML says are at fault; needs the extra `gpu-health`. `act`: a host goes on
    without one, as `devices_after_loss` says; one that cannot does not join, or is quarantined when it fails while it
    trains. `report`: both are only recorded. `off`: NVML is not
    loaded."""

    devices_after_loss: Literal["even", "all", "host"] = "even"
    """What a host does without a device that must not compute any more: one of its GPUs failed, or it is slow,
    or `resilient-jax hosts drain` has taken it out. `even`: its worker is started again with as many of the others as
    divide the host's number, four of eight, so that meshes still fit, and the rest stand by. `all`: with all others;
    for scripts whose replicas take any number of devices, such as `ReplicaShape(per_host="devices")`. `host`: the host
    is quarantined."""

    digest_interval_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 64
    """Steps between two whose sums and state are recorded as digests in the run folder of the first host, by which
    `resilient-jax replay` checks what was computed. A record reads sums and state once; 0: none."""

    state_loss_grace_s: Seconds = 30.0
    """Seconds to wait for missing hosts before the state in their memory counts as lost: the network may only be
    partitioned. What follows costs more: the job ends, or resumes from a checkpoint."""

    state_loss_policy: Literal["checkpoint", "stop", "restart"] = "checkpoint"
    """What to do when all hosts with the training state died at once, and no snapshot can be restored. `checkpoint`:
    resume from the newest checkpoint on storage, and stop with an error if there is none; `stop`: stop although there
    is one; `restart`: as `checkpoint`, but with the initial state if there is none. Only `restart` starts over."""

    @property
    def heartbeat_timeout_s(self) -> float:
        """Seconds without a message of a worker's guard until the agent kills the worker.

        Later than the other hosts name a hang and ask its worker to leave: they know more about it.
        """
        return self.hang_timeout_s + self.quiesce_timeout_s

    @property
    def store_timeout_s(self) -> float:
        """Seconds for which an agent tries to reach the store before it gives up."""
        return STORE_TIMEOUT_LEASES * self.lease_ttl_s
