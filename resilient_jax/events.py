"""Events: the typed record that logs, tables and tests read.

An event is recorded by the process that saw it, and written as one JSON line. `monotonic_s` orders events of one
machine to the microsecond; across machines only `wall_s` is comparable, as well as the clocks are.
"""

import enum

import msgspec


class EventKind(enum.StrEnum):
    """The kinds of events.

    Their docstrings name what `Event.detail` has; a test compares the names with the code that records.
    """

    # processes
    AGENT_STARTED = "agent.started"
    """An agent began to supervise its host. Detail: `pid`."""
    AGENT_STOPPED = "agent.stopped"
    """An agent is about to exit."""
    WORKER_STARTED = "worker.started"
    """An agent started its worker's process. Detail: `pid`, `incarnation`."""
    WORKER_PROMOTED = "worker.promoted"
    """A standby has become this host's worker, in place of a new process. Detail: `pid`, `incarnation`, `seconds`."""
    WORKER_START_FAILED = "worker.start_failed"
    """The machine could not start a worker; the agent tries again. Detail: `error`."""
    WORKER_EXITED = "worker.exited"
    """A worker's process ended. Detail: `incarnation`, `exit_code` (negative: ended by that signal)."""
    SCRIPT_FAILED = "script.failed"
    """A script ended with an error of its own. Detail: `exit_code`, `error` (with its complete traceback)."""
    WORKER_UNRESPONSIVE = "worker.unresponsive"
    """A worker is stopped (SIGSTOP), or its guard thread sent nothing for too long. Detail: `pid`."""
    WORKER_OVERDUE = "worker.overdue"
    """A worker has made no progress for longer than the deadline of its task; its stacks are in the run folder. Detail:
    `task`, `place` (of its main thread), `silent_s`, `deadline_s`."""
    WORKER_WAITS_FOR_ALL = "worker.waits_for_all"
    """A worker's main thread waits in a function of a library that all hosts must call. Detail: `place`, `silent_s`."""
    WORKER_DYING = "worker.dying"
    """A worker's threads have ended; its exit code follows when the kernel has freed its memory. Detail: `pid`."""
    WORKER_KILLED = "worker.killed"
    """An agent killed its worker. Detail: `pid`, `why`."""
    SIGNAL_ORDERED = "signal.ordered"
    """A command (`resilient-jax kill --store`) had an agent send a signal to processes of its host. Detail:
    `component`, `signal`, `pids`."""
    WORKER_NOT_FORKED = "worker.not_forked"
    """A worker is started as a process of its own, because the zygote cannot fork it. Detail: `why`."""
    ZYGOTE_STARTED = "zygote.started"
    """A process that workers are forked from was started, by `launch` or by an agent. Detail: `pid`."""
    ZYGOTE_READY = "zygote.ready"
    """A zygote has imported what workers import. Detail: `pid`, `seconds` since its start, `memory_mib` (resident),
    `failed_imports` (modules of the worker that it could not import), `obstacle` (why it forks no worker; empty: it
    does)."""
    ZYGOTE_FAILED = "zygote.failed"
    """An agent's zygote cannot replace the one before. Detail: `reason`, `retried` (whether another is started
    later)."""
    ZYGOTE_EXITED = "zygote.exited"
    """A zygote ended by itself; the workers that were forked from it live on. Detail: `pid`, `exit_code`."""
    STANDBY_STARTED = "standby.started"
    """An agent started a standby of its worker. Detail: `pid`."""
    STANDBY_READY = "standby.ready"
    """A standby waits to replace its host's worker. Detail: `pid`, `seconds` since its start, `memory_mib`
    (resident)."""
    STANDBY_FAILED = "standby.failed"
    """A standby ended, or cannot replace the worker. Detail: `pid`, `reason`, `retried` (whether another is started
    later)."""
    RESTART_BACKOFF = "restart.backoff"
    """A dead worker is started again later, because it died shortly before, too. Detail: `seconds`."""
    RESTART_BUDGET_EXHAUSTED = "restart.budget_exhausted"
    """A worker died more often than `max_restarts` allows. Detail: `limit`."""
    COORDINATION_SERVICE_STARTED = "coordination_service.started"
    """JAX's coordination service of a world serves. Detail: `world`, `address`, `pid`."""
    COORDINATION_SERVICE_START_FAILED = "coordination_service.start_failed"
    """JAX's coordination service did not start; the leader asks again. Detail: `world`, `error`."""
    COORDINATION_SERVICE_STANDBY_LOST = "coordination_service.standby_lost"
    """The process that waits to be the next world's service was killed or stopped, and is replaced. Detail: `pid`."""
    COORDINATION_SERVICE_EXITED = "coordination_service.exited"
    """JAX's coordination service of a world ended. Detail: `world`, `exit_code`."""
    COORDINATION_SERVICE_SEAT_LOST = "coordination_service.seat_lost"
    """A coordination service was told that a member was given up. Detail: `world`, `answer` (the seat and
    the seconds it took, or why it could not be told)."""
    # membership
    LEADER_ELECTED = "leader.elected"
    """This host's agent leads from now on. Detail: `token` (grows with every leader)."""
    LEADER_RESIGNED = "leader.resigned"
    """This host's agent no longer leads: another revision or leader was found in the store; or it got a
    notice to leave, or is in quarantine, and lets another host lead."""
    HOST_LOST = "host.lost"
    """The leader saw that a host's lease is gone. Detail: `lost` (the host)."""
    HOST_FOUND_DEAD = "host.found_dead"
    """No process listens any more where a host's agent did, so this host's agent ended its lease before its time.
    Detail: `dead` (the host)."""
    HOSTS_UNREACHED = "hosts.unreached"
    """Members did not go on, and no connection to the workers of these hosts could be made from this one. If that
    lasts, or they say the same, the leader takes the fewest hosts out, and names the pairs. Detail: `hosts`."""
    HOST_DRAINING = "host.draining"
    """A notice (SIGTERM): this host leaves between two steps; in a pipeline, once blocks are copied.
    Detail: `signal`, `seconds` (of its grace)."""
    HOST_QUARANTINED = "host.quarantined"
    """A host takes no part in the job for a while. Detail: `quarantined` (the host), `seconds`, `reason`."""
    DEVICE_QUARANTINED = "device.quarantined"
    """A device computes nothing for a while. Detail: `quarantined` (the host), `device` (its number), `seconds`,
    `reason`."""
    DEVICES_CHANGED = "devices.changed"
    """Workers of this host that start from now on use other devices. One that runs is ended: at once if a device
    failed, else when others have all of the state. Detail: `devices` (their numbers), `num_devices` (of the host),
    `why`."""
    DEVICES_REQUIRED = "devices.required"
    """The worker computes with all devices of its host or not at all, as a stage of a pipeline does whose hosts must
    have the same axes: from now on the host is quarantined while one of them is out. Detail: `found` (devices that the
    worker has), `expected`, `why` (it ends now; empty: it has all)."""
    HOST_SPARE_USED = "host.spare_used"
    """A host that spared takes part, in the place of one that is missing. Detail: `spare` (the host), `change` (of the
    generation)."""
    HOST_SPARE_UNSEATED = "host.spare_unseated"
    """Spares got no seat of this world, because all are taken: they join by a re-form. Detail: `spares` (the hosts),
    `seats` (of this world)."""
    STORE_LOST = "store.lost"
    """The store does not answer, or the lease was not renewed: this host does not train. Detail: `why`."""
    STORE_RECONNECTED = "store.reconnected"
    """The store answers again, and this host has a new lease."""
    STORE_JOURNAL_UNWRITTEN = "store.journal_unwritten"
    """The journal of the store that this host's agent serves cannot be written: what changes in the job's records is
    not confirmed until it is, so no host joins or leaves. Leases go on, and so does training. Detail: `path`, `why`."""
    STORE_JOURNAL_WRITTEN = "store.journal_written"
    """It is written again, with all that had to wait. Detail: `path`."""
    TREE_PARENT_LOST = "tree.parent_lost"
    """The agent to which this host's agent reports, and which writes its status, does not answer: the host writes its
    status itself, and the leader names another agent. Detail: `parent` (its endpoint)."""
    RECOVERY_DECIDED = "recovery.decided"
    """The leader chose what to do at a change of members, or about a slow host. Detail: `action`, `reason`, `options`
    (each with its score, and why it is not possible), `next_failure_s`, `wait_s` (0: the action is carried out at
    once)."""
    GENERATION_PHASE = "generation.phase"
    """The leader wrote a generation or its next phase. Detail: `phase`, `change` (`shrink` or `reform`), `hosts`
    (their number), `reason`, `token` of the leader, `revision` of the store."""
    HANG_NAMED = "hang.named"
    """The leader found which host keeps the others waiting, and acts on it. Detail: `hosts` (that hang; empty: all have
    entered the same collective), `why`, `action`."""
    GENERATION_STALE = "generation.stale"
    """A record or order of an older generation was refused. Detail: `newest`, and from a worker `refused`."""
    STATE_REDUNDANCY = "state.redundancy"
    """The number of further losses of hosts that the committed state survives has changed. Detail: `losses` (0: the
    next may be that of the state), `copies` (hosts with a complete state; of one in parts, with each of them),
    `snapshot` (whether host memory has one)."""
    STATE_LOST = "state.lost"
    """No live host holds the training state. Detail: `source` (what training resumes from), `goes_on_from` (the
    step), `steps_lost`, `at_least` (whether more steps may be lost), `reason`."""
    # Snapshots: the job's side
    SNAPSHOT_SERVER_STARTED = "snapshot.server_started"
    """An agent started its host's snapshot server. Detail: `pid`."""
    SNAPSHOT_SERVER_EXITED = "snapshot.server_exited"
    """A host's snapshot server ended. Detail: `pid`, `exit_code`."""
    SNAPSHOT_LAYOUT = "snapshot.layout"
    """The workers agreed where snapshots are kept. Detail: `bytes` of this host's part, `groups` (their number),
    `parity` (hosts of a group that may be lost)."""
    SNAPSHOT_DEGRADED = "snapshot.degraded"
    """Snapshots survive fewer losses than configured. Detail: `why`."""
    SNAPSHOT_INTERVAL = "snapshot.interval"
    """The interval of automatic snapshots was chosen. Detail: `steps`, and the measured `blocked_s`, `copy_s` and
    `step_s` of the slowest host; `next_failure_s`, after which a failure is expected by those that the job
    has seen; 0: not known."""
    SNAPSHOT_UNREADABLE = "snapshot.unreadable"
    """A snapshot cannot be restored: more of it is lost or corrupt than its parity covers. Detail: `error`."""
    SNAPSHOT_RESTORED = "snapshot.restored"
    """This host restored its part of the state. Detail: `seconds`, and the bytes read from its own memory
    (`local`), from other hosts (`peer`), and decoded from parity (`decoded`)."""
    # Snapshots: reading
    SNAPSHOT_FALLBACK = "snapshot.fallback"
    """A host's part is read from another source. Detail: `part` (whose), `to` (the source), `reason`."""
    SNAPSHOT_SOURCE_FAILED = "snapshot.source_failed"
    """A host does not serve a snapshot that it should have. Detail: `source`, `reason`."""
    SNAPSHOT_BLOCK_CORRUPT = "snapshot.block_corrupt"
    """A block of a snapshot does not match its checksum, and counts as lost. Detail: `source`, `asked` (what was
    read), `reason`."""
    # Snapshots: training
    SNAPSHOT_COPIED = "snapshot.copied"
    """This host's part is in the memory of the snapshot server. Detail: `bytes`, `seconds`."""
    SNAPSHOT_DROPPED = "snapshot.dropped"
    """A snapshot is not taken; the one before it is still there. Detail: `reason`."""
    # Snapshots: server
    SNAPSHOT_ERASURE_KERNEL = "snapshot.erasure_kernel"
    """A snapshot server chose its erasure code and checksum. Detail: `kernel`, `reason`, `checksum`."""
    SNAPSHOT_SLOTS_ALLOCATED = "snapshot.slots_allocated"
    """A snapshot server mapped the memory of its slots. Detail: `nbytes`, `duration_s`."""
    SNAPSHOT_REFUSED = "snapshot.refused"
    """A snapshot server refused a request about a snapshot. Detail: `error`."""
    SNAPSHOT_COMPLETE = "snapshot.complete"
    """This host has its part and parity of a snapshot. Detail: `nbytes`."""
    SNAPSHOT_COMMITTED = "snapshot.committed"
    """All hosts have their part and parity: the snapshot counts. Detail: `nbytes`."""
    SNAPSHOT_PEER_FAILED = "snapshot.peer_failed"
    """Another host's snapshot server failed in the exchange of parity. Detail: `peer`, `error`."""
    SNAPSHOT_CORRUPT = "snapshot.corrupt"
    """Bytes of a snapshot on this host do not match their checksum. Detail: `error`."""
    # Checkpoints
    CHECKPOINT_SAVED = "checkpoint.saved"
    """A checkpoint is on storage and verified. Detail: `path`, `bytes` of all files, `seconds`, `existed` (whether it
    had been written before)."""
    CHECKPOINT_SKIPPED = "checkpoint.skipped"
    """A checkpoint was due, but the one before is still being written. Detail: `in_flight` (its step),
    `in_flight_s`."""
    CHECKPOINT_FAILED = "checkpoint.failed"
    """A checkpoint could not be written. Detail: `path`, `reason`."""
    CHECKPOINT_REFUSED = "checkpoint.refused"
    """A checkpoint is incomplete or damaged, and an older one is tried. Detail: `path`, `reason`."""
    CHECKPOINT_RESTORED = "checkpoint.restored"
    """Training resumes from a checkpoint. Detail: `path`, `bytes` read by this host, and `steps_lost` if a state
    was lost."""
    CHECKPOINT_POLL_FAILED = "checkpoint.poll_failed"
    """An idle worker could not look for checkpoints. Detail: `reason`."""
    # a worker in a change of generation
    COLLECTIVE_FAILED = "collective.failed"
    """A collective failed, or another host did not answer; the membership changes and the step is finished. Detail:
    `error`."""
    STATE_DIFFERS = "state.differs"
    """The committed states of hosts differ. Detail: `hosts` (that differ from most, or all if there is no majority),
    `steps` (committed)."""
    DATA_DIFFERS = "data.differs"
    """Reads of the same microbatch returned different arrays. Detail: `hosts` (that differ from most, or all if there
    is no majority), `microbatch`."""
    AUDIT_PASSED = "audit.passed"
    """Hosts computed the same bits of each other's microbatches; recorded by the first host. Detail: `hosts` (that are
    verified up to this step)."""
    AUDIT_FAILED = "audit.failed"
    """Hosts computed different bits of a microbatch. Detail: `microbatch`, `compared` (owner, auditor and, if there is
    one, referee), `corrupt` (the host that is wrong, "" if it cannot be said), `why`."""
    HOST_CORRUPT = "host.corrupt"
    """This host computes wrongly, and leaves the job. Detail: `why`."""
    CHECKPOINT_DISTRUSTED = "checkpoint.distrusted"
    """A checkpoint may have been touched by a host that computed wrongly; it is renamed and not read again. Detail:
    `path` (the new one)."""
    DIGESTS_UNWRITTEN = "digests.unwritten"
    """Digests of steps cannot be written into the run folder; this worker writes no more of them. Detail: `why`."""
    SUM_REPEATED = "sum.repeated"
    """Numbers of a step were far above those of its microbatch 0, or not finite, so its exact sum is made again, in any
    range. Detail: `name` of the accumulation, `leaves` (of which these were)."""
    MICROBATCHES_REBALANCED = "microbatches.rebalanced"
    """Hosts compute other shares of a step's microbatches from now on, by their measured speeds. Detail: `name` of the
    accumulation, `shares` (by host: how many, and the milliseconds of each). The first host's worker records it."""
    HOST_SLOW = "host.slow"
    """Microbatches of a host, or reductions because of its link, take longer than predicted, and more so than those of
    its peers. Detail: `slow` (the host), `part` (compute, memory, input, link, or other: its devices are as fast as
    others), `factor` (how many times as long), `since_step`, `why` (what was measured). The first host's worker records
    it."""
    HOST_SLOW_ENDED = "host.slow_ended"
    """A host that was reported as slow is no longer slow, or has left. Detail: `slow`, `part`, `why`. The same worker
    records it; it never comes if another host becomes the first meanwhile."""
    LINKS_MEASURED = "links.measured"
    """All hosts have exchanged the same bytes in pairs, to know what their links take. Detail: `median_s` and
    `slowest_s` (what an exchange takes, in seconds), `slowest` (the two hosts of the slowest one). The first host's
    worker records it."""
    # GPUs: recorded by agents
    GPU_UNWATCHED = "gpu.unwatched"
    """The GPUs of this host are not watched, or not for XIDs. Detail: `why`."""
    GPU_FAILED = "gpu.failed"
    """A GPU of this host must not train any more; what follows depends on `gpu_health`. Detail: `gpu`, `what` (such as
    XID 79), `why`, `is_worker_ended` (whether work on it cannot be trusted, or is lost)."""
    GPU_SUSPECTED = "gpu.suspected"
    """The error of a script is one that a device causes: the GPUs of this host are read at once. Detail: `error`."""
    GPU_NOTED = "gpu.noted"
    """A GPU of this host, or its driver, reported something that is no reason to stop. Detail: `gpu`, `what`, `why`."""
    GPU_THROTTLED = "gpu.throttled"
    """A GPU of this host has lower clocks because of heat or a lack of power, for three readings in a row. Detail:
    `gpu`, `why` (with its temperature and clocks)."""
    GPU_THROTTLED_ENDED = "gpu.throttled_ended"
    """A GPU that was throttled is no longer. Detail: `gpu`, `readings` (that said it was, one in 5 s)."""
    SCRIPT_ENDED = "script.ended"
    """A script has come to its end after training; what follows is the shutdown of Python and of libraries."""
    SCRIPT_REFUSED = "script.refused"
    """A worker was not let in, or left: the job's other hosts run another script, or its own cannot run on this host.
    Detail: `why` (with both values)."""
    SCRIPT_CHANGED = "script.changed"
    """The script, or a module of its user's, is another one on disk than when the job began, or gone; the job goes on
    with its copy in the run folder. Once for each file. Detail: `file`, `kept` (the copy)."""
    SCRIPT_NOT_KEPT = "script.not_kept"
    """A module of the user's was imported, but no copy could be written to the run folder: a worker that starts later
    imports it as it is then. Detail: `file`, `why`."""
    WORKER_IDLE = "worker.idle"
    """A worker has left its training function, and waits for a generation. Detail: `done` (whether the function
    returned)."""
    PLAN_CHOSEN = "plan.chosen"
    """The planner chose another plan, or a host with one has joined. Detail: `plan`, `before` (empty: none), `axes` of
    the replicas of hosts ("equal", "unequal"), `step_s` (estimated), `kept_step_s` (the same for the hosts that there
    are with the axes before; 0: they do not fit, there were none, or they were unequal), `reason`."""
    PLAN_CALIBRATED = "plan.calibrated"
    """The constants of estimates were fitted to this job's steps. Detail: `plan`, `step_s` (measured), `estimated_s`
    (with the constants that the job was given), `calibrated_s` (with those fitted), `error_before`, `error` (of the two
    over all `plans` that the job has run: root mean square of the logarithm, 0.1 is about 10 %), `constants` that
    changed."""
    PIPELINE_FORMED = "pipeline.formed"
    """The model is split over the hosts of a generation. Detail: `replicas`, `blocks` of the model, `cut` (the hosts of
    each replica, with their first and last block; of one with fewer devices than others their number)."""
    PIPELINE_STATE_KEPT = "pipeline.state_kept"
    """The hosts go on with the units that they have in memory, and send each other those that move. Detail:
    `received` (bytes that came to this host), `copied` (bytes of units that it has from before: they were copied while
    the others trained), `seconds`."""
    PIPELINE_STEP_RESUMED = "pipeline.step_resumed"
    """A step goes on in a new generation. Detail: `kept` (tasks that this host had done), `seconds` (of those
    that were left)."""
    PIPELINE_REBALANCED = "pipeline.rebalanced"
    """Replicas compute other shares of a step's microbatches from now on, or hosts run their tasks in another order, by
    what tasks were measured to take. Detail: `shares` (microbatches of each replica), `before_s` and `after_s`
    (what the tasks of a step take by that, without and with the change). The first host's worker records it."""
    STATE_SHARDED = "state.sharded"
    """The state is sharded. Detail: `bytes` of the state, `bytes_here` on this host, `bytes_everywhere` (what every
    host has, because it could not be sharded)."""
    UPDATE_HAS_COLLECTIVES = "update.has_collectives"
    """The optimizer's update of a sharded state communicates, so bits depend on the number of hosts. Detail:
    `collectives`."""
    STATE_COPIED = "state.copied"
    """This host copied its state to host memory, for a new world or for other hosts. Detail: `bytes`, `seconds`."""
    STATE_FETCHED = "state.fetched"
    """This host got the state from another host, or its shards from several. Detail: `bytes`, `seconds`."""
    STATE_SOURCE_FAILED = "state.source_failed"
    """A host did not serve the state; another is asked. Detail: `source`, `error`."""
    WORLD_LEFT = "world.left"
    """A worker has left its JAX world. Detail: `seconds`, and what references of the script kept alive:
    `leaked_backends`, `leaked_clients`."""
    SEAT_TAKEN = "seat.taken"
    """A worker has connected to a spare seat of the world in which others train. Detail: `seconds`."""
    SEAT_NOT_TAKEN = "seat.not_taken"
    """A worker could not connect to its seat, and joins by a re-form. Detail: `error`."""
    STEP_REHEARSED = "step.rehearsed"
    """A worker that is about to join has loaded the programs of a step, while the others trained. Detail: `seconds`,
    and why not all of it was possible, if so: `problem`."""
    STEP_REPEATED = "step.repeated"
    """A worker that was interrupted before its commit finished a step that others had committed, with their results.
    Detail: `seconds`."""
    WORLD_MEMBERS_MET = "world.members_met"
    """The members of a generation met in JAX's coordination service, before their first collective; with `live_nodes`
    only. Detail: `hosts` (their number), `seconds`."""
    WORLD_FORMED = "world.formed"
    """A worker has entered the world of a generation. Detail: `change` (`shrink`, `grow`, `reform`), `hosts` (their
    number), `seconds`."""
    STEP_COMMITTED = "step.committed"
    """A worker committed the first step of a generation."""
    USER_ERROR = "user.error"
    """The script raised an error, which ends the job. Detail: `error`."""
    NONFINITE = "microbatch.nonfinite"
    """Microbatches have a NaN or an infinity in loss or gradient. Detail: `microbatches`, `done` (what becomes of
    them)."""
    COMPILE_CACHE_DISABLED = "compile_cache.disabled"
    """Compiled programs are not shared between hosts, or lowered ones not kept. Detail: `why`."""
    PROGRAMS_READY = "programs.ready"
    """The first step of a generation has its programs. Detail: `seconds` (in all), `compiled` and `fetched` (their
    number), `compiled_s`."""
    COMPILE_CACHE_MISS = "compile_cache.miss"
    """Training had to compile a program itself. Detail: `program`, `digest`, `seconds`."""
    PROGRAM_COMPILED_AHEAD = "program.compiled_ahead"
    """The programs of a likely next world are compiled. Detail: `world`, `seconds`."""
    PROGRAM_FAILED = "program.failed"
    """A program could not be compiled ahead, or not be fetched. Detail: `reason`, and `world` or `owner` (the host
    that has it)."""
    DEATH_PIPE_DISABLED = "death_pipe.disabled"
    """A worker's death is noticed later: its death pipe does not work. Detail: `why`."""
    # transport
    REQUEST_UNAUTHENTICATED = "request.unauthenticated"
    """A request had no job token, or a wrong one. Detail: `method`, `reason`, `peer`."""
    REQUEST_MALFORMED = "request.malformed"
    """A request could not be decoded. Detail: `method`, `reason`, `peer`."""
    LOG_UNWRITABLE = "log.unwritable"
    """Events were dropped while the log could not be written. Detail: `lost` (their number)."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened on one host.

    Attributes:
        host: host that has the event in its log.
        monotonic_s: this machine's monotonic clock; comparable within one machine only.
        wall_s: this machine's wall clock, in seconds since 1970.
        generation: generation that the event belongs to; None: no generation, or the current one.
        step: step that the event belongs to; of a commit, the number of committed steps; None: no step.
        detail: more, by name; see `EventKind`. Durations are in seconds.
    """

    kind: EventKind
    host: str
    monotonic_s: float
    wall_s: float
    generation: int | None = None
    step: int | None = None
    detail: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
