"""The history of a job, on which decisions rest: its failures, and the times of its changes. Pure.

A leader measures with its own clock (`LeaderMemory`) and writes what it has measured with the next generation, so that
the next leader begins with it. What a leader has not seen from the beginning it does not measure.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import (
    MembershipState,
    find_newest_step,
    find_worker,
    have_all_finished_step,
    is_cold,
    is_joiner,
)
from resilient_jax.membership.kept_stages import list_absent
from resilient_jax.membership.leader_memory import LeaderMemory
from resilient_jax.membership.loss_causes import find_left, find_loss_causes, has_notice
from resilient_jax.membership.phases import may_follow
from resilient_jax.membership.planned_axes import find_decided_number, gives_up_axes
from resilient_jax.policy.failure_forecast import (
    MAX_RECORDS,
    add_return,
    count_losses,
    forget_returns,
)
from resilient_jax.protocol.generation import Generation, GenerationPhase, WorldChange
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import (
    KEEPING_ACTIONS,
    JobHistory,
    LossCause,
    MeasuredTime,
    RecoveryAction,
    TimedChange,
)

MAX_QUIESCE_S: Final = 5.0
"""Until all members are idle, as by default (`quiesce_timeout_s`). What lasts longer is a wait for hosts."""
MAX_RECENT: Final = 5
"""Of these measurements the median counts: two of them may be of a busy machine."""
_TIMED: Final = {
    WorldChange.SHRINK: TimedChange.SHRINK,
    WorldChange.GROW: TimedChange.GROW,
    WorldChange.REFORM: TimedChange.REFORM,
}


def note_transition(state: MembershipState, after: Generation, now: float) -> MembershipState:
    """Return the state with the next generation, or phase, and with what it adds to the job's history."""
    before, memory = state.generation, state.memory
    assert may_follow(before, after), f"{after.phase} {after.number} after {before.phase} {before.number}"
    since_s = memory.observed_until_s if memory.observed_until_s is not None else now
    history = _get_history(state)
    history = msgspec.structs.replace(history, observed_s=history.observed_s + now - since_s)
    memory = dataclasses.replace(memory, observed_until_s=now, unwritten=None)
    if after.record.decision != before.record.decision:
        memory = dataclasses.replace(memory, decided_s=now)
    if after.number > before.number:
        history = _note_step_time(state, history, now)
        memory = dataclasses.replace(memory, steady_since_s=None, gives_up_stages=False)
        noticed = (m.host for m in before.membership.members if has_notice(state, m.host))
        memory = dataclasses.replace(memory, noticed=frozenset(noticed))
        if after.phase is GenerationPhase.QUIESCE:
            lost = [
                m.host
                for m in before.membership.members
                if find_worker(state, m) is None
                or (
                    (after.membership.keeps_workers or after.membership.members)
                    and m not in after.membership.members
                )
            ]
            stalled = memory.stalled_since_s if memory.stalled_since_s is not None else now
            memory = dataclasses.replace(memory, stalled_since_s=stalled)
            failed = [
                host for host in lost if host != after.failures.taken_out and not _is_planned(before, host)
            ]
            causes = find_loss_causes(state, failed)
            history, memory = _note_losses(history, memory, causes, after, now)
    elif before.phase is GenerationPhase.BOUNDARY:
        gives_up = (
            bool(list_absent(before))
            and not list_absent(after)
            and before.membership.members == after.membership.members
        )
        # What it takes to give axes up is the time of no change that a decision prices.
        stalled_since_s = None if gives_up_axes(before) else now
        memory = dataclasses.replace(memory, stalled_since_s=stalled_since_s, gives_up_stages=gives_up)
    elif after.phase is GenerationPhase.FORM and _has_waited(before, memory, now):
        # What follows a wait takes as long as without one.
        memory = dataclasses.replace(memory, stalled_since_s=now)
    if after.phase is GenerationPhase.FORM and before.phase is not GenerationPhase.FORM:
        memory = dataclasses.replace(memory, has_cold_members=_has_cold_members(state, after))
        history, memory = _note_losses(history, memory, find_left(state, after), after, now)
        history, memory = _note_members_back(history, memory, after, now)
        history = forget_returns(history, _list_missed(state, after, now))
    return dataclasses.replace(
        state, generation=change_fields(after, history=history), phase_since_s=now, memory=memory
    )


def _note_members_back(
    history: JobHistory, memory: LeaderMemory, after: Generation, now: float
) -> tuple[JobHistory, LeaderMemory]:
    """Return both without the members that were away; those that were waited for are back only now."""
    waiting = dict(memory.lost_since_s)
    for host, (since_s, cause) in memory.lost_since_s.items():
        if after.membership.find_member(host) is not None:
            del waiting[host]
            history = add_time(history, TimedChange.RETURN, now - since_s)
            history = add_return(history, host, cause, now - since_s)
    away = tuple(one for one in history.away if after.membership.find_member(one.host) is None)
    return msgspec.structs.replace(history, away=away), dataclasses.replace(memory, lost_since_s=waiting)


def _list_missed(state: MembershipState, after: Generation, now: float) -> list[HostName]:
    """Return the hosts that were waited for to the end, and are no members after it."""
    decision = state.generation.record.decision
    if decision is None or decision.action not in (RecoveryAction.WAIT, *KEEPING_ACTIONS):
        return []
    if now - state.memory.decided_s <= decision.wait_s:
        return []
    return [host for host in decision.awaited if after.membership.find_member(host) is None]


def _is_planned(before: Generation, host: HostName) -> bool:
    """Return whether a worker was lost because it was decided that its host goes on with fewer devices."""
    member = before.membership.find_member(host)
    return member is not None and (host, member.incarnation) in before.record.slowness.restarting


def _has_cold_members(state: MembershipState, after: Generation) -> bool:
    """Return whether hosts become members that have loaded no programs yet, for which the others wait."""
    before = {(member.host, member.incarnation) for member in state.generation.membership.members}
    come = [
        m.host
        for m in after.membership.members
        if (m.host, m.incarnation) not in before and m.host in state.hosts
    ]
    return any(is_cold(state.hosts[host]) for host in come)


def _has_waited(before: Generation, memory: LeaderMemory, now: float) -> bool:
    """Return whether hosts were waited for in this change: then its time counts from the end of the wait."""
    decision = before.record.decision
    if decision is not None and decision.action is RecoveryAction.WAIT and decision.number == before.number:
        return True
    return memory.stalled_since_s is not None and now - memory.stalled_since_s > MAX_QUIESCE_S


def note_progress(state: MembershipState, now: float) -> MembershipState:
    """Return the state with what can be measured now: the change that is over, and the hosts that are back."""
    generation, memory = state.generation, state.memory
    if generation.phase is not GenerationPhase.ACTIVE:
        return state
    is_measured = memory.steady_since_s is not None and not memory.lost_since_s
    if is_measured or not (generation.membership.members and have_all_finished_step(state)):
        return state
    if memory.steady_since_s is None:
        state = _note_first_step(state, now)
    return _note_returns(state, now)


def _note_losses(
    history: JobHistory,
    memory: LeaderMemory,
    lost: Mapping[HostName, LossCause],
    after: Generation,
    now: float,
) -> tuple[JobHistory, LeaderMemory]:
    """Return both with members that were lost, or left, at one moment."""
    since = {**memory.lost_since_s, **{host: (now, cause) for host, cause in lost.items()}}
    memory = dataclasses.replace(memory, lost_since_s=dict(list(since.items())[-MAX_RECORDS:]))
    return count_losses(history, lost, after.number), memory


def add_time(history: JobHistory, change: TimedChange, seconds: float) -> JobHistory:
    """Return the history with one more measurement."""
    old = next((time for time in history.times if time.change is change), MeasuredTime(change, (), 0))
    new = MeasuredTime(change, (*old.recent_s, seconds)[-MAX_RECENT:], old.count + 1)
    others = tuple(time for time in history.times if time.change is not change)
    return msgspec.structs.replace(history, times=(*others, new))


def bound_step_s(state: MembershipState, now: float) -> float:
    """Return how long a step of the present generation takes at most, in the mean; infinite: it is not known.

    Those of other generations, which may have more hosts, do not count.
    """
    memory = state.memory
    if memory.steady_since_s is None:
        return math.inf
    # The first report may have been late: of slow steps by one at most.
    steps = find_newest_step(state) - memory.steady_step - 1
    return (now - memory.steady_since_s) / steps if steps > 0 else math.inf


def _note_step_time(state: MembershipState, history: JobHistory, now: float) -> JobHistory:
    """Return the history with the time of a step in the generation that ends."""
    memory = state.memory
    if memory.steady_since_s is None:
        return history
    steps = find_newest_step(state) - memory.steady_step
    if steps <= 0 or now <= memory.steady_since_s:
        return history
    step_s = (now - memory.steady_since_s) / steps
    # It has the time until a loss was noticed in it, which in a short generation is most of it.
    return msgspec.structs.replace(history, step_s=min(step_s, history.step_s or step_s))


def _note_first_step(state: MembershipState, now: float) -> MembershipState:
    generation, memory = state.generation, state.memory
    history, stalled_since_s = _get_history(state), memory.stalled_since_s
    # Without the time of a step it is not known which part of the time is the change.
    if stalled_since_s is not None and history.step_s > 0:
        seconds = max(now - stalled_since_s - history.step_s, 0.0)
        is_restored = generation.state.state_loss is not None or (
            generation.state.snapshot is not None and not generation.state.is_in_parts
        )
        change = TimedChange.RESTORE if is_restored else _find_timed_change(generation, memory)
        if change is not None:
            history = add_time(history, change, seconds)
    memory = dataclasses.replace(
        memory,
        stalled_since_s=None,
        steady_since_s=now,
        steady_step=find_newest_step(state),
        num_used={
            member.host: status.devices.num_used
            for member in generation.membership.members
            if (status := state.hosts.get(member.host)) is not None and status.devices.num_used
        },
        unwritten=history,
    )
    return dataclasses.replace(state, memory=memory)


def _find_timed_change(generation: Generation, memory: LeaderMemory) -> TimedChange | None:
    """Return of which change the time was measured; None: of one to axes whose programs were not ready."""
    decision = generation.record.decision
    if generation.record.slowness.divided_in == generation.number or memory.gives_up_stages:
        return TimedChange.REDIVIDE
    if decision is not None and find_decided_number(decision) == generation.number:
        if decision.action is RecoveryAction.KEEP_STAGES:
            return TimedChange.KEEP_STAGES
        if decision.prepare_s:
            return None
        if decision.has_new_axes and decision.action is RecoveryAction.SHRINK:
            return TimedChange.NEW_AXES
    if generation.membership.change is WorldChange.REFORM and memory.has_cold_members:
        return TimedChange.REFORM_COLD
    return _TIMED[generation.membership.change]


def _note_returns(state: MembershipState, now: float) -> MembershipState:
    """Return the state with the times of the hosts that are ready to join again."""
    generation, memory = state.generation, state.memory
    history, waiting = _get_history(state), dict(memory.lost_since_s)
    for host, (since_s, cause) in memory.lost_since_s.items():
        status = state.hosts.get(host)
        if status is not None and is_joiner(generation, status, None):
            del waiting[host]
            history = add_time(history, TimedChange.RETURN, now - since_s)
            history = add_return(history, host, cause, now - since_s)
    if len(waiting) == len(memory.lost_since_s):
        return state
    memory = dataclasses.replace(memory, lost_since_s=waiting, unwritten=history)
    return dataclasses.replace(state, memory=memory)


def _get_history(state: MembershipState) -> JobHistory:
    """Return the history with what is not written yet. No decision rests on that: another leader would not know it."""
    return state.memory.unwritten or state.generation.record.history
