"""Events: the typed record that logs, tables and tests read.

An event is recorded by the process that saw it, and written as one JSON line. `monotonic_s` orders events of one
machine to the microsecond; across machines only `wall_s` is comparable, as well as the clocks are.
"""

import enum

import msgspec


class EventKind(enum.StrEnum):
    """The closed set of events."""

    # processes
    AGENT_STARTED = "agent.started"
    AGENT_STOPPED = "agent.stopped"
    WORKER_STARTED = "worker.started"
    WORKER_START_FAILED = "worker.start_failed"
    WORKER_EXITED = "worker.exited"
    WORKER_UNRESPONSIVE = "worker.unresponsive"
    WORKER_DYING = "worker.dying"
    WORKER_KILLED = "worker.killed"
    RESTART_BACKOFF = "restart.backoff"
    RESTART_BUDGET_EXHAUSTED = "restart.budget_exhausted"
    COORDINATION_SERVICE_STARTED = "coordination_service.started"
    COORDINATION_SERVICE_START_FAILED = "coordination_service.start_failed"
    COORDINATION_SERVICE_EXITED = "coordination_service.exited"
    # membership
    LEADER_ELECTED = "leader.elected"
    LEADER_RESIGNED = "leader.resigned"
    HOST_LOST = "host.lost"
    HOST_DRAINING = "host.draining"
    STORE_LOST = "store.lost"
    STORE_RECONNECTED = "store.reconnected"
    GENERATION_PHASE = "generation.phase"
    GENERATION_STALE = "generation.stale"
    STATE_LOST = "state.lost"
    # Snapshots: the job's side
    SNAPSHOT_SERVER_STARTED = "snapshot.server_started"
    SNAPSHOT_SERVER_EXITED = "snapshot.server_exited"
    SNAPSHOT_LAYOUT = "snapshot.layout"
    SNAPSHOT_DEGRADED = "snapshot.degraded"
    SNAPSHOT_INTERVAL = "snapshot.interval"
    SNAPSHOT_UNREADABLE = "snapshot.unreadable"
    SNAPSHOT_RESTORED = "snapshot.restored"
    # Snapshots: reading
    SNAPSHOT_FALLBACK = "snapshot.fallback"
    SNAPSHOT_SOURCE_FAILED = "snapshot.source_failed"
    SNAPSHOT_BLOCK_CORRUPT = "snapshot.block_corrupt"
    # Snapshots: training
    SNAPSHOT_COPIED = "snapshot.copied"
    SNAPSHOT_DROPPED = "snapshot.dropped"
    # Snapshots: server
    SNAPSHOT_ERASURE_KERNEL = "snapshot.erasure_kernel"
    SNAPSHOT_SLOTS_ALLOCATED = "snapshot.slots_allocated"
    SNAPSHOT_REFUSED = "snapshot.refused"
    SNAPSHOT_COMPLETE = "snapshot.complete"
    SNAPSHOT_COMMITTED = "snapshot.committed"
    SNAPSHOT_PEER_FAILED = "snapshot.peer_failed"
    SNAPSHOT_CORRUPT = "snapshot.corrupt"
    # Checkpoints
    CHECKPOINT_SAVED = "checkpoint.saved"
    CHECKPOINT_SKIPPED = "checkpoint.skipped"
    CHECKPOINT_FAILED = "checkpoint.failed"
    CHECKPOINT_REFUSED = "checkpoint.refused"
    CHECKPOINT_RESTORED = "checkpoint.restored"
    CHECKPOINT_POLL_FAILED = "checkpoint.poll_failed"
    # a worker in a change of generation
    COLLECTIVE_FAILED = "collective.failed"
    WORKER_IDLE = "worker.idle"
    PLAN_CHOSEN = "plan.chosen"
    STATE_SHARDED = "state.sharded"
    UPDATE_HAS_COLLECTIVES = "update.has_collectives"
    STATE_COPIED = "state.copied"
    STATE_FETCHED = "state.fetched"
    STATE_SOURCE_FAILED = "state.source_failed"
    WORLD_LEFT = "world.left"
    WORLD_FORMED = "world.formed"
    STEP_COMMITTED = "step.committed"
    USER_ERROR = "user.error"
    NONFINITE = "microbatch.nonfinite"
    COMPILE_CACHE_DISABLED = "compile_cache.disabled"
    PROGRAMS_READY = "programs.ready"
    COMPILE_CACHE_MISS = "compile_cache.miss"
    PROGRAM_COMPILED_AHEAD = "program.compiled_ahead"
    PROGRAM_FAILED = "program.failed"
    DEATH_PIPE_DISABLED = "death_pipe.disabled"
    # transport
    REQUEST_UNAUTHENTICATED = "request.unauthenticated"
    REQUEST_MALFORMED = "request.malformed"
    LOG_UNWRITABLE = "log.unwritable"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event on one host."""

    kind: EventKind
    host: str
    monotonic_s: float
    wall_s: float
    generation: int | None = None
    step: int | None = None
    detail: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
