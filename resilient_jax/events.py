"""What happened, as values: the typed record that logs, tables and tests read.

An event is written as one JSON line by the process that saw it. `monotonic_s` orders events of one
machine to the microsecond; across machines only `wall_s` is comparable, as well as the clocks are.
"""

import enum

import msgspec


class EventKind(enum.StrEnum):
    """Closed set of things that happen."""

    # processes
    AGENT_STARTED = "agent.started"
    AGENT_STOPPED = "agent.stopped"
    WORKER_STARTED = "worker.started"
    WORKER_START_FAILED = "worker.not_started"
    WORKER_READY = "worker.ready"
    WORKER_EXITED = "worker.exited"
    WORKER_UNRESPONSIVE = "worker.stopped"
    WORKER_DYING = "worker.dying"
    WORKER_SILENT = "worker.silent"
    WORKER_KILLED = "worker.killed"
    RESTART_BACKOFF = "restart.delayed"
    RESTART_BUDGET_EXHAUSTED = "restart.budget_exhausted"
    COORDINATION_SERVICE_STARTED = "service.started"
    COORDINATION_SERVICE_START_FAILED = "service.not_started"
    COORDINATION_SERVICE_EXITED = "service.exited"
    # membership
    LEADER_ELECTED = "leader.elected"
    LEADER_RESIGNED = "leader.resigned"
    HOST_JOINED = "host.joined"
    HOST_LOST = "host.lost"
    HOST_REFUSED = "host.refused"
    HOST_DRAINING = "host.draining"
    STORE_LOST = "store.lost"
    STORE_RECONNECTED = "store.regained"
    GENERATION_PHASE = "generation.phase"
    GENERATION_STALE = "generation.refused"
    STATE_LOST = "state.lost"
    JOB_FINISHED = "job.finished"
    # Snapshots: the job's side
    SNAPSHOT_SERVER_STARTED = "snapshot.server_started"
    SNAPSHOT_SERVER_EXITED = "snapshot.server_exited"
    SNAPSHOT_LAYOUT = "snapshot.layout"
    SNAPSHOT_DEGRADED = "snapshot.weaker"
    SNAPSHOT_INTERVAL = "snapshot.interval"
    SNAPSHOT_UNREADABLE = "snapshot.unreadable"
    SNAPSHOT_RESTORED = "snapshot.restored"
    # Snapshots: reading
    SNAPSHOT_FALLBACK = "snapshot.fallback"
    SNAPSHOT_SOURCE_FAILED = "snapshot.source_failed"
    SNAPSHOT_BLOCK_CORRUPT = "snapshot.block_bad"
    # Snapshots: training
    SNAPSHOT_COPIED = "snapshot.copied"
    SNAPSHOT_DROPPED = "snapshot.dropped"
    # Snapshots: server
    SNAPSHOT_ERASURE_KERNEL = "snapshot.kernel"
    SNAPSHOT_SLOTS_ALLOCATED = "snapshot.opened"
    SNAPSHOT_REFUSED = "snapshot.refused"
    SNAPSHOT_COMPLETE = "snapshot.complete"
    SNAPSHOT_COMMITTED = "snapshot.committed"
    SNAPSHOT_PEER_FAILED = "snapshot.peer_failed"
    SNAPSHOT_CORRUPT = "snapshot.damaged"
    # Checkpoints
    CHECKPOINT_SAVED = "checkpoint.saved"
    CHECKPOINT_SKIPPED = "checkpoint.skipped"
    CHECKPOINT_FAILED = "checkpoint.failed"
    CHECKPOINT_REFUSED = "checkpoint.refused"
    CHECKPOINT_RESTORED = "checkpoint.restored"
    CHECKPOINT_POLL_FAILED = "checkpoints.unseen"
    # the worker's way through a change
    COLLECTIVE_FAILED = "collective.failed"
    COLLECTIVES_ABORTED = "collectives.aborted"
    WORKER_IDLE = "worker.unwound"
    PLAN_CHOSEN = "plan.chosen"
    STATE_SHARDED = "state.cut"
    UPDATE_HAS_COLLECTIVES = "update.not_local"
    STATE_COPIED = "state.copied"
    STATE_FETCHED = "state.fetched"
    STATE_SOURCE_FAILED = "state.refused"
    WORLD_LEFT = "world.left"
    WORLD_FORMED = "world.formed"
    STEP_COMMITTED = "step.committed"
    USER_ERROR = "user.error"
    NONFINITE = "microbatch.not_finite"
    COMPILE_CACHE_DISABLED = "compile_cache.off"
    PROGRAMS_READY = "programs.ready"
    COMPILE_CACHE_MISS = "program.missed"
    PROGRAM_COMPILED_AHEAD = "program.ahead"
    PROGRAM_FAILED = "program.refused"
    DEATH_PIPE_DISABLED = "tripwire.off"
    # transport
    REQUEST_UNAUTHENTICATED = "token.refused"
    REQUEST_MALFORMED = "message.refused"
    LOG_UNWRITABLE = "log.unwritable"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened, on one host."""

    kind: EventKind
    host: str
    monotonic_s: float
    wall_s: float
    generation: int | None = None
    step: int | None = None
    detail: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
