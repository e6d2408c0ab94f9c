"""The knobs of one job: deadlines, budgets, and what to do when the state is gone."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
"""A positive duration of at most a day: a longer one is a mistyped unit, and `inf` would unbound a wait."""

Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a job that is a choice and not an address.

    Every agent of a job must be given the same values. Ranges are checked by `load`, `decode` and
    `override`; calling the class checks nothing.

    Example:
        >>> from resilient_jax.config import JobConfig, decode
        >>> decode("lease_ttl_s = 5", JobConfig, source="job.toml").lease_ttl_s
        5.0
    """

    lease_ttl_s: Seconds = 3.0
    """Seconds without a keep-alive until the store counts a host as dead. A lost host is noticed
    this late at worst; much shorter, and a busy machine's pause is taken for a death."""

    forming_deadline_s: Seconds = 60.0
    """Seconds for all members of a new generation to connect; whoever has not is left out. Covers
    a slow import and a cold file system, not a compilation."""

    quiesce_deadline_s: Seconds = 5.0
    """Seconds for a worker to leave its collectives and acknowledge a change; then it is killed.
    Aborting takes milliseconds, a long local program may have to end first."""

    start_deadline_s: Seconds = 300.0
    """Seconds from the launch until `min_hosts` have come; then the job ends with an error. Machines
    of one allocation come up minutes apart."""

    silence_deadline_s: Seconds = 60.0
    """Seconds without a word of a worker's guard thread until the agent kills the worker. The guard
    speaks even while XLA compiles, so this catches a stopped or wedged process, not a slow step."""

    store_deadline_s: Seconds = 60.0
    """Seconds an agent keeps trying to reach the store before it gives up. Outlasts the restart
    of a store node."""

    restart_limit: Annotated[int, Meta(ge=0, le=1_000_000)] = 5
    """Restarts of one host's worker within `restart_window_s`; after one more the host gives up and leaves,
    and the others go on without it. Zero: never restart."""

    restart_window_s: Seconds = 600.0
    """Seconds that a restart counts against `restart_limit`. Forgets old failures, so that a month's
    job is not ended by five crashes spread over it."""

    restart_backoff_s: Annotated[float, Meta(ge=0, le=3_600)] = 1.0
    """Seconds before a worker's second restart in a window, doubled for each one after. The first
    restart is immediate: most crashes do not repeat."""

    min_hosts: Count = 1
    """Hosts below which the job does not train, but waits for others to come (back)."""

    collective_retry_limit: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    """New generations at one step after failed collectives in which nobody died; then the error is
    taken for the user's own and ends the job."""

    snapshot_parity: Annotated[int, Meta(ge=0, le=254)] = 1
    """How many hosts of a group may be lost at once without losing a snapshot in memory. Each costs about
    1/(group - parity) of a snapshot's memory more."""

    snapshot_every: Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["auto"] = 1
    """Steps between two snapshots; `auto`: from what one costs and how often hosts fail (Young and Daly)."""

    snapshot_group_size: Annotated[int, Meta(ge=2, le=255)] = 8
    """Hosts that keep parity for each other, at most. Larger groups take less memory for the same parity, and
    lose everything with fewer failures in all."""

    failure_interval_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 10_800.0
    """Seconds between two failures anywhere in the job, as expected; used by `snapshot_every = "auto"`.
    Three hours: Llama 3's training on 16,384 GPUs."""

    on_state_lost: Literal["checkpoint", "stop", "restart"] = "checkpoint"
    """When every holder of the training state died at once, and no snapshot can be restored: `checkpoint`: go on from
    the newest checkpoint on storage, and stop with an error if there is none; `stop`: do so although there is one;
    `restart`: begin with the initial state if there is none. Starting over is never done unasked."""
