"""The rules of membership: which hosts are members, and what happens next. Pure: no socket, clock or randomness.

The rules, from which the code below follows:

1. A generation's number only grows, and every change of its members takes a new number.
2. A number passes through its phases in one direction:
   unplanned  QUIESCE -> FORM -> ACTIVE;  planned  PAUSE -> BOUNDARY -> FORM -> ACTIVE.
3. A worker is a member in FORM only if it has reported, for this very number or as a request to join, that it is idle.
   So no worker trains in two generations at once. An idle worker that was dropped before it answered may have been
   sent into a world since its last report: it is no joiner before it answers.
4. A member that dies, stops or fails, in any phase, leads to QUIESCE under the next number with the members that are
   left. A member that is not idle within the timeout is left out as well.
5. Hosts join, and leave after a notice, only between two steps (planned), except that a host which is ready when an
   unplanned change is decided joins in the same change (but in 13). In a new world all would wait for the programs of
   one that has loaded none: whether others go on without it, and it prepares in a seat, is weighed (11). While others
   train a host is given a spare seat of their world, and is ready once it has taken it: it joins in place. Without a
   seat, or if it cannot take it, by a re-form. A member's standby is given a seat, too: when the member dies, it is the
   host's worker at once, and ready.
6. The newest complete state wins: a member's, which the others fetch; or that which members have together, each a part,
   and take along into a new world; or a snapshot of which enough is left on the hosts, which all restore. If there is
   none in a job that had made progress, all begin with the newest checkpoint that a host sees on storage; without one
   the job ends with that reason, unless its policy is to restart.
   Members that find a host which computes wrongly say which states it cannot have touched: others count no more.
7. A host whose script raises an error is tried again, and taken out; what two hosts raise alike, or none can do
   without, ends the job (`raised_errors`). A collective that fails although no host died is
   retried a few times; then the host that reported most of the failures is quarantined, and if that does not help, the
   job ends with the error. A worker that keeps the others waiting (`hangs`) is left out. What escalates, and how, is in
   `severities`. A host in quarantine leaves as after a notice, and does not join.
8. Where collectives cannot be aborted, an unplanned change has no survivors: the agents kill all workers that were
   in the world, and those that replace them resume from a snapshot. While there is none, workers with the state stay.
9. If the members that are left have the last copy of the state (`redundancy`), hosts that may bring another one are
   waited for longer: a member that is late to stop, and a host whose worker takes a seat just now, or, if there are no
   seats, is starting. Nothing ends or leaves out a member that answers and is the last with the state, and a host in
   quarantine that alone has it is let in (`last_holders`).
10. There are as many places as hosts that were not started as spares (`spare_hosts`). Whichever host is ready first
   takes a place that is free, and no host gives up its place for another; the rest waits with a seat.
11. Where the rules above leave a choice, the policy makes it (`policy.choice`): whether members wait for a host that
   comes back, and whether hosts that are ready join now. Its decision is in the generation, and every leader obeys it.
12. A slow host that costs more than shares by speed give back is replaced, taken out, or given fewer layers, where the
   policy finds that worth a planned change (`slowness`): one host at a time.
13. After a loss the members of a pipeline finish their step in their world, by mail, also if its coordination service
   has ended (`world_formation.can_go_on_by_mail`). A world without a service is left between two steps.
14. Members that cannot reach each other say so: the smallest set of hosts that explains it is taken out, and the pairs
   are named (`reachability`). If none can be spared, all wait with their state for the network.
15. A job all of whose hosts got a notice ends at a boundary: in the last step before it, it saves a checkpoint. Where a
   host has no time left, or at Ctrl-C on all hosts, it ends as it is. Its outcome says what is saved (`job_end`).

The rules read only statuses (levels), so a new leader goes on from the store. machine.py has them applied when a change
may matter to one of them. facts.py interprets the statuses, spare_hosts.py chooses the members, rendezvous.py says
whether to wait for more, world_formation.py builds the next world, and state_loss.py decides what follows the loss of a
state.
"""

import dataclasses
from typing import assert_never

from resilient_jax.errors import ExitCode
from resilient_jax.membership.commands import MembershipCommand, PublishGeneration, QuarantineHost
from resilient_jax.membership.config import (
    ALL_LATE_FACTOR,
    LAST_COPY_FACTOR,
    OLDER_STATE_FACTOR,
    MembershipConfig,
)
from resilient_jax.membership.disruptions import Disruption, find_disruption
from resilient_jax.membership.doubt import doubt_newer_states, find_corrupt_hosts
from resilient_jax.membership.facts import (
    MembershipState,
    awaits_snapshot_report,
    count_needed_hosts,
    find_needed_hosts,
    find_newest_step,
    find_recoverable_step,
    find_snapshot,
    find_worker,
    has_service,
    have_all_finished_step,
    is_cold,
    is_idle,
    is_snapshot_needed,
    join_names,
    list_joiners,
    list_live_workers,
    list_survivors,
    owes_answer,
    owes_reach_report,
)
from resilient_jax.membership.generation_end import break_off, finish, quiesce
from resilient_jax.membership.hangs import Hang, describe_places, find_hang
from resilient_jax.membership.job_end import (
    decide_to_end,
    decide_to_end_now,
    have_all_notice,
    must_save_first,
)
from resilient_jax.membership.job_history import note_progress, note_transition
from resilient_jax.membership.kept_stages import note_stage_hosts
from resilient_jax.membership.last_holders import find_suspect, is_needed_by_others
from resilient_jax.membership.planned_axes import find_constants, list_axes
from resilient_jax.membership.planned_change import decide_in_pause, plan_change
from resilient_jax.membership.protection import choose_protection
from resilient_jax.membership.raised_errors import explain_by_error, react_to_errors
from resilient_jax.membership.reachability import Separation, find_separation, make_separation_outcome
from resilient_jax.membership.recovery_decision import decide_after_loss
from resilient_jax.membership.redundancy import count_losses_left, is_last_copy_without
from resilient_jax.membership.rendezvous import Rendezvous, decide_to_wait
from resilient_jax.membership.severities import Action, Evidence, Tries, choose_action
from resilient_jax.membership.slowness import forget_outdated, list_new_quarantines
from resilient_jax.membership.spare_hosts import (
    admit_hosts,
    choose_joiners,
    count_places,
    list_staying,
)
from resilient_jax.membership.state_loss import (
    decide_after_state_loss,
    is_any_polling_checkpoints,
)
from resilient_jax.membership.world_formation import (
    StartCoordinationService,
    StateOrigin,
    find_state_origin,
    form_next_generation,
    give_seats,
)
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome, JobOutcomeKind, Member
from resilient_jax.protocol.host_status import HostStatus, WorkerStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import NeededHosts, RecoveryAction
from resilient_jax.protocol.state_records import StateLoss


def decide(
    state: MembershipState, now: float, config: MembershipConfig
) -> tuple[MembershipState, tuple[MembershipCommand, ...]]:
    """Decide what follows from the statuses of all hosts; return the new state and the shell's commands, in order."""
    commands: list[MembershipCommand] = []
    while True:
        state = note_progress(state, now)
        least = count_needed_hosts(state, now - state.phase_since_s, config.regroup_grace_s)
        limits = dataclasses.replace(config, min_hosts=max(config.min_hosts, least))
        transition = _next_transition(state, now, limits)
        if transition is None:
            break
        # Nothing in the state changes by it: the machine goes on when a status shows that the service runs.
        if isinstance(transition, StartCoordinationService):
            commands.append(transition)
            break
        needed = find_needed_hosts(state)
        if transition.phase is GenerationPhase.FORM and len(transition.membership.members) < needed.count:
            # It is tried: what members said before is void.
            needed = NeededHosts(generation=transition.number)
        transition = change_fields(transition, keeps_workers=not config.replaces_workers, needed_hosts=needed)
        taken_out = find_corrupt_hosts(state) if transition.state.trusted_step is not None else frozenset()
        failures, known = transition.failures, state.generation.failures
        if failures.taken_out is not None and failures.taken_out != known.taken_out:
            taken_out |= {failures.taken_out}
        taken_out |= set(failures.separated) - set(known.separated)
        taken_out -= state.quarantined
        slowness = transition.record.slowness
        commands += list_new_quarantines(state, slowness)
        before, count = state.generation.record.slowness.count_taken_out, slowness.count_taken_out
        earlier, state = state.generation, note_transition(state, transition, now)
        state = dataclasses.replace(state, quarantined=state.quarantined | taken_out)
        # It lasts longer only for a host that is taken out as a slow one now: then it is counted with this number.
        commands += [
            QuarantineHost(host, transition.reason, before(host) if count(host) > before(host) else 0)
            for host in sorted(taken_out)
        ]
        measured = change_fields(state.generation, losses_left=count_losses_left(state))
        if measured.phase is GenerationPhase.FORM:
            protection = choose_protection(earlier, measured, find_snapshot(state))
            measured = change_fields(measured, protection=protection)
        state = dataclasses.replace(state, generation=measured)
        commands.append(PublishGeneration(measured))
    return state, tuple(commands)


def _next_transition(
    state: MembershipState, now: float, config: MembershipConfig
) -> Generation | StartCoordinationService | None:
    generation = state.generation
    if generation.phase is GenerationPhase.FINISHED:
        return None
    if (ended := _end_early(state, config)) is not None:
        return ended
    match generation.phase:
        case GenerationPhase.QUIESCE:
            return _in_quiesce(state, now, config)
        case GenerationPhase.PAUSE:
            return decide_in_pause(state)
        case GenerationPhase.BOUNDARY:
            # No timeout: a step takes as long as it takes, and a member that dies or stops is a disruption.
            return _settle(state, now, config) if all(map(is_idle, list_live_workers(state))) else None
        case GenerationPhase.FORM:
            return _in_form(state, now, config)
        case GenerationPhase.ACTIVE:
            return _in_active(state, now, config)
        case _:
            assert_never(generation.phase)


def _end_early(state: MembershipState, config: MembershipConfig) -> Generation | None:
    """Return what follows a generation that is over before its phase is: by an error, a loss, a notice or a hang."""
    # Before disruptions: the exit of a worker with an error of the script's is a lost member as well.
    if (reaction := react_to_errors(state, config)) is not None:
        return reaction
    if (outcome := decide_to_end_now(state, config)) is not None:
        return finish(state.generation, outcome)
    if (separation := find_separation(state, config)) and (parted := _part(state, separation, config)):
        return parted
    # In QUIESCE idle members are what is waited for, and reports still carry the failure that led here.
    if state.generation.phase is not GenerationPhase.QUIESCE and (disruption := find_disruption(state)):
        return break_off(state, disruption, config)
    if hang := find_hang(state):
        return _end_hang(state, hang, config)
    return None


def _part(state: MembershipState, separation: Separation, config: MembershipConfig) -> Generation | None:
    """Return the next number, in QUIESCE, without the hosts that leave; None: none can be spared, and all have stopped.

    Where all workers of a world are replaced none stops for nothing: what they have would be gone.
    """
    generation, out = state.generation, separation.out
    if not out and (generation.phase is GenerationPhase.QUIESCE or config.replaces_workers):
        return None
    left = tuple(m for m in generation.membership.members if m.host not in out)
    parted = break_off(state, Disruption(separation.reason), config, left)
    return change_fields(parted, separated=(*generation.failures.separated, *out))


def _end_hang(state: MembershipState, hang: Hang, config: MembershipConfig) -> Generation:
    """Return the next number, in QUIESCE, without the workers that hang: their agents end them if they do not unwind.

    If none of them has failed to enter a collective, all try again. So do all, with the workers that hang, if these
    have the last copy of the state.
    """
    reason, survivors = hang.reason, list_survivors(state)
    left = tuple(m for m in survivors if m.host not in hang.hosts)
    if is_needed_by_others(state, survivors, hang.hosts):
        reason, left = (
            f"{reason}; nobody is left out, as no other host and no snapshot has the state",
            survivors,
        )
    why = Disruption(reason, hang.hosts[0] if hang.hosts else None, hang.reason)
    quiescing = break_off(state, why, config, left)
    return change_fields(quiescing, hang=hang.reason)


def _in_quiesce(
    state: MembershipState, now: float, config: MembershipConfig
) -> Generation | StartCoordinationService | None:
    generation = state.generation
    lost = [m.host for m in generation.membership.members if find_worker(state, m) is None]
    if lost:
        return quiesce(state, Disruption(f"lost {join_names(lost)}"))
    waited_s = now - state.phase_since_s
    waiting: list[tuple[Member, WorkerStatus]] = []
    here: list[WorkerStatus] = []
    for member, worker in zip(generation.membership.members, list_live_workers(state), strict=True):
        if is_idle(worker) and worker.report.generation >= generation.number:
            here.append(worker)
        else:
            waiting.append((member, worker))
    # Leaving out every host with the state would lose it: then a longer wait costs less. Only an idle worker reports
    # what it has: one that fetches or commits just now has not reported it yet.
    # A snapshot hardly stands in for a complete state, which may be some steps newer.
    has_snapshot = find_snapshot(state) is not None
    is_snapshot_newest = has_snapshot and not any(w.report.held.holds_state for _, w in waiting)
    if is_snapshot_newest or any(w.report.held.holds_state for w in here):
        # If all are late, a slow machine is more likely than a hang, but gloo has hung all survivors of a dead host.
        is_last_copy = is_last_copy_without(state, _without_late(generation, waiting))
        patience_s = config.quiesce_timeout_s * (
            ALL_LATE_FACTOR if not here else LAST_COPY_FACTOR if is_last_copy else 1
        )
    elif has_snapshot:
        patience_s = config.quiesce_timeout_s * OLDER_STATE_FACTOR
    else:
        patient = not here or find_recoverable_step(state) > 0
        patience_s = config.compile_timeout_s if patient else config.quiesce_timeout_s
    for _, worker in waiting:
        if waited_s <= (config.compile_timeout_s if worker.report.is_compiling else patience_s):
            return None
    if waiting:
        names = join_names(m.host for m, _ in waiting)
        left = _without_late(generation, waiting)
        text = f"{names} did not stop within {waited_s:.1f} s{describe_places(waiting)}"
        if is_needed_by_others(state, generation.membership.members, [m.host for m, _ in waiting]):
            text += "; no other host and no snapshot has the state, which is lost with them"
        return quiesce(state, Disruption(text), left)
    return _settle_in_reach(state, now, config)


def _without_late(generation: Generation, late: list[tuple[Member, WorkerStatus]]) -> tuple[Member, ...]:
    """Return the members that are not late."""
    names = {member.host for member, _ in late}
    return tuple(m for m in generation.membership.members if m.host not in names)


def _in_form(state: MembershipState, now: float, config: MembershipConfig) -> Generation | None:
    generation = state.generation
    late = [
        (member, worker)
        for member, worker in zip(generation.membership.members, list_live_workers(state), strict=True)
        if not (worker.report.place.has_formed and worker.report.generation == generation.number)
    ]
    if not late:
        return change_fields(generation, phase=GenerationPhase.ACTIVE)
    if now - state.phase_since_s > config.forming_timeout_s:
        hosts = [member.host for member, _ in late]
        text = f"{join_names(hosts)} did not join the world within {config.forming_timeout_s:g} s"
        why = Disruption(text + describe_places(late), hosts[0], text)
        return break_off(state, why, config)
    return None


def _in_active(state: MembershipState, now: float, config: MembershipConfig) -> Generation | None:
    generation = state.generation
    if generation.membership.members and all(w.report.is_done for w in list_live_workers(state)):
        return finish(generation, JobOutcome(kind=JobOutcomeKind.DONE, exit_code=int(ExitCode.DONE)))
    # So that a job which hosts join and leave all the time advances by a step in every generation.
    if not have_all_finished_step(state):
        return None
    # All have resumed from the snapshot: hosts that stay only because of it may leave.
    snapshot = generation.state.snapshot if is_snapshot_needed(state) else None
    resumed, separated = generation.state, generation.failures.separated
    if (snapshot, None, None, ()) != (resumed.snapshot, resumed.state_loss, resumed.trusted_step, separated):
        return change_fields(generation, snapshot=snapshot, state_loss=None, trusted_step=None, separated=())
    progress = find_recoverable_step(state)
    if count_losses_left(state) != generation.record.losses_left:
        return change_fields(generation, progress=max(progress, generation.record.progress))
    if progress > generation.record.progress and (
        # Every transition sets `phase_since_s`, this record too: it is the time since the last one.
        generation.record.progress == 0 or now - state.phase_since_s >= config.progress_interval_s
    ):
        # Recorded before it can be lost: if all hosts die at once, the next leader must not restart the job. Later
        # periodically, so that the next leader can report how many steps are lost.
        return change_fields(generation, progress=progress)
    joiners, spares = admit_hosts(state, list_staying(state), list_joiners(state), config.num_hosts)
    if has_service(state) and (given := give_seats(state, joiners, spares)) is not None:
        return given
    return plan_change(state, joiners, now, config)


def _settle_in_reach(
    state: MembershipState, now: float, config: MembershipConfig
) -> Generation | StartCoordinationService | None:
    """Settle once the members reach each other: those that have failed first report whom, or might fail again."""
    generation, waited_s = state.generation, now - state.phase_since_s
    hosts = [state.hosts[member.host] for member in generation.membership.members]
    if waited_s <= config.reach_timeout_s and any(owes_reach_report(generation, status) for status in hosts):
        return None
    separation = find_separation(state, config)
    if separation is None:
        return _settle(state, now, config)
    # None of them can be spared, or it would have left by now.
    if waited_s <= config.start_timeout_s:
        return None
    return finish(generation, make_separation_outcome(separation, waited_s))


def _settle(
    state: MembershipState, now: float, config: MembershipConfig
) -> Generation | StartCoordinationService | None:
    """Decide, once all members are idle, which hosts resume, from which state, and how."""
    generation = state.generation
    if (escalated := _escalate(state, config)) is not None:
        return escalated
    # The worker's report comes sooner than its server's: to decide now could choose an older state than there is.
    # A host that hangs answers no more, and soon has no lease.
    if any(awaits_snapshot_report(state.hosts[m.host]) for m in generation.membership.members) or any(
        owes_answer(generation, status) for status in state.hosts.values()
    ):
        return None
    if (doubted := doubt_newer_states(state, generation.number)) is not None:
        return doubted
    kept = _list_kept(state)
    joiners = choose_joiners(state, kept, config)
    waited_s = now - state.phase_since_s
    if generation.membership.members and not kept:
        # All members must leave. They stay for one more generation: joiners fetch from them, or they save a checkpoint.
        if not joiners and not must_save_first(state):
            outcome = decide_to_end(state, waited_s, config)
            return finish(generation, outcome) if outcome is not None else None
        kept = [state.hosts[m.host] for m in generation.membership.members]
    origin = find_state_origin(state, kept, joiners)
    lost: StateLoss | None = None
    if generation.record.progress > 0 and not origin.exists and (kept or joiners):
        are_all_here = sum(not status.is_spare for status in state.hosts.values()) >= config.num_hosts
        # No state that a host may bring back would count if it is in doubt.
        if generation.state.trusted_step is None and waited_s <= (
            config.regroup_grace_s if are_all_here else max(config.regroup_grace_s, config.state_loss_grace_s)
        ):
            return None  # a host that only lost the store for a moment rejoins with its state
        if waited_s <= config.checkpoint_poll_timeout_s and is_any_polling_checkpoints(
            [*kept, *joiners], config.state_loss_policy
        ):
            return None  # storage that hangs must not block the job forever
        decision = decide_after_state_loss(state, [*kept, *joiners], config.state_loss_policy)
        if isinstance(decision, JobOutcome):
            return finish(generation, explain_by_error(generation, decision))
        lost = decision
    return _form(state, kept, joiners, origin, lost, now, config)


def _list_kept(state: MembershipState) -> list[HostStatus]:
    """Return the members that go on: all that do not leave, and those that leave if only they have the state.

    Then they stay for one more generation, in which the others fetch it.
    """
    members, staying = state.generation.membership.members, list_staying(state)
    stay = {status.host for status in staying}
    leaving = [member.host for member in members if member.host not in stay]
    if staying and is_needed_by_others(state, members, leaving):
        return [state.hosts[member.host] for member in members]
    return staying


def _escalate(state: MembershipState, config: MembershipConfig) -> Generation | None:
    """Return what follows attempts that failed although no host died; None: another attempt."""
    generation = state.generation
    tries = {Tries.COLLECTIVE: config.max_collective_retries}
    failures = generation.failures
    if failures.attempts == 0:
        return None
    action = choose_action(Evidence.COLLECTIVE_FAILED, failures.attempts - 1, tries)
    if action is Action.TAKE_HOST_OUT and failures.taken_out is not None:
        return None  # what is left is tried once
    suspect, spared = (
        find_suspect(state, max(config.min_hosts, 1)) if action is Action.TAKE_HOST_OUT else (None, None)
    )
    if suspect is not None:
        blamed = "it" if spared is None else f"{spared}, which has the last copy of the state,"
        reason = (
            f"{suspect} is taken out: training failed {failures.attempts} times in a row at step "
            f"{find_newest_step(state)} although no host died, and {blamed} reported most of the failures: "
            f"{generation.reason}"
        )
        left = tuple(m for m in generation.membership.members if m.host != suspect)
        without = quiesce(state, Disruption(reason, suspect, failures.failure_text), left)
        return change_fields(
            without, attempts=failures.attempts, suspects=failures.suspects, taken_out=suspect
        )
    if action is Action.RETRY_IN_PLACE:
        return None
    without = f", also without {failures.taken_out}" if failures.taken_out is not None else ""
    message = (
        f"training failed {failures.attempts} times in a row at step {find_newest_step(state)} although "
        f"no host died{without}; the last error:\n{failures.failure_text or generation.reason}"
    )
    host = failures.failed_host
    return finish(
        generation, JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=1, host=host, message=message)
    )


def _form(
    state: MembershipState,
    kept: list[HostStatus],
    joiners: list[HostStatus],
    origin: StateOrigin,
    lost: StateLoss | None,
    now: float,
    config: MembershipConfig,
) -> Generation | StartCoordinationService | None:
    """Return the generation of these hosts, unless more are waited for."""
    arrived = decide_to_wait(state, kept, joiners, now - state.phase_since_s, origin, config)
    if isinstance(arrived, JobOutcome):
        return finish(state.generation, arrived)
    if arrived is Rendezvous.WAITING:
        return None
    decision, renews_world = state.generation.record.decision, False
    is_loss = state.generation.phase is GenerationPhase.QUIESCE and state.generation.membership.world > 0
    if is_loss and not have_all_notice(state):  # else there is no time to wait for others
        decision = decide_after_loss(state, kept, joiners, origin, now, config)
        if decision is None:
            return None
        if decision.action is RecoveryAction.WAIT:
            return change_fields(state.generation, decision=decision)
        renews_world = decision.action is RecoveryAction.REFORM
        if renews_world:  # hosts without programs prepare in its seats
            joiners = [status for status in joiners if not is_cold(status)]
    staying = [status for status in (*kept, *joiners) if not status.is_draining]
    places = count_places(state, staying, config.num_hosts)
    # The world of a host alone has seats if others may come: they prepare in them while it trains.
    spare_seats = config.spare_seats if max(places, len(state.hosts)) > 1 else 0
    formed = form_next_generation(state, kept, joiners, origin, lost, spare_seats, renews_world=renews_world)
    if isinstance(formed, StartCoordinationService):
        return formed
    formed = change_fields(formed, decision=decision, max_members=places)
    formed = note_stage_hosts(state, formed, decision, kept)
    axes = list_axes(state.generation, decision, kept, joiners)
    constants = find_constants(state.generation, kept)
    formed = change_fields(formed, plan_axes=axes, plan_constants=constants)
    return forget_outdated(formed, state.quarantined)
