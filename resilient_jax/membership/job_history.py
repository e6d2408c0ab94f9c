"""The history of a job, on which decisions rest: its failures, and the times of its changes. Pure.

A leader measures with its own clock (`LeaderMemory`) and writes what it has measured with the next generation, so that
the next leader begins with it. What a leader has not seen from the beginning it does not measure.
"""

import dataclasses
from collections.abc import Iterable
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import (
    MembershipState,
    find_newest_step,
    find_worker,
    have_all_finished_step,
    is_joiner,
)
from resilient_jax.membership.leader_memory import LeaderMemory
from resilient_jax.protocol.records import Generation, GenerationPhase, WorldChange
from resilient_jax.protocol.recovery_records import (
    HostFailures,
    JobHistory,
    MeasuredTime,
    RecoveryAction,
    TimedChange,
)

MAX_WEIGHT: Final = 8
"""A mean follows a change of the machine after about so many measurements."""
MAX_QUIESCE_S: Final = 5.0
"""Until all members are idle, as by default (`quiesce_timeout_s`). What lasts longer is a wait for hosts."""
MAX_HOSTS: Final = 64
"""The hosts whose failures are counted one by one: those that failed last. The record stays small in a large job."""

_TIMED: Final = {
    WorldChange.SHRINK: TimedChange.SHRINK,
    WorldChange.GROW: TimedChange.GROW,
    WorldChange.REFORM: TimedChange.REFORM,
}


def note_transition(state: MembershipState, after: Generation, now: float) -> MembershipState:
    """Return the state with the next generation, or phase, and with what it adds to the job's history."""
    before, memory = state.generation, state.memory
    since_s = memory.observed_until_s if memory.observed_until_s is not None else now
    history = _get_history(state)
    history = msgspec.structs.replace(history, observed_s=history.observed_s + now - since_s)
    memory = dataclasses.replace(memory, observed_until_s=now, unwritten=None)
    if after.decision != before.decision:
        memory = dataclasses.replace(memory, decided_s=now)
    if after.number > before.number:
        history = _note_step_time(state, history, now)
        memory = dataclasses.replace(memory, steady_since_s=None)
        if after.phase is GenerationPhase.QUIESCE:
            lost = [
                m.host
                for m in before.members
                if find_worker(state, m) is None or (after.keeps_workers and m not in after.members)
            ]
            history = count_failures(history, [host for host in lost if not _is_planned(before, host)])
            stalled = memory.stalled_since_s if memory.stalled_since_s is not None else now
            lost_since = {**memory.lost_since_s, **dict.fromkeys(lost, now)}
            memory = dataclasses.replace(
                memory,
                stalled_since_s=stalled,
                lost_since_s=dict(list(lost_since.items())[-MAX_HOSTS:]),
            )
    elif before.phase is GenerationPhase.BOUNDARY:
        memory = dataclasses.replace(memory, stalled_since_s=now)
    elif after.phase is GenerationPhase.FORM and _has_waited(before, memory, now):
        memory = dataclasses.replace(memory, stalled_since_s=None)
    return dataclasses.replace(
        state, generation=msgspec.structs.replace(after, history=history), phase_since_s=now, memory=memory
    )


def _is_planned(before: Generation, host: HostName) -> bool:
    """Return whether a worker was lost because it was decided that its host goes on with fewer devices."""
    decision = before.slowness.decision
    return (
        decision is not None
        and decision.action is RecoveryAction.FEWER_DEVICES
        and (decision.number, decision.slow) == (before.number, host)
    )


def _has_waited(before: Generation, memory: LeaderMemory, now: float) -> bool:
    """Return whether hosts were waited for in this change: then it is no measure of its kind."""
    decision = before.decision
    if decision is not None and decision.action is RecoveryAction.WAIT and decision.number == before.number:
        return True
    return memory.stalled_since_s is not None and now - memory.stalled_since_s > MAX_QUIESCE_S


def note_progress(state: MembershipState, now: float) -> MembershipState:
    """Return the state with what can be measured now: the change that is over, and the hosts that are back."""
    generation, memory = state.generation, state.memory
    if generation.phase is not GenerationPhase.ACTIVE:
        return state
    is_measured = memory.steady_since_s is not None and not memory.lost_since_s
    if is_measured or not (generation.members and have_all_finished_step(state)):
        return state
    if memory.steady_since_s is None:
        state = _note_first_step(state, now)
    return _note_returns(state, now)


def count_failures(history: JobHistory, lost: Iterable[HostName]) -> JobHistory:
    """Return the history after the loss of members at one moment; unchanged if there are none."""
    counts = {failures.host: failures.count for failures in history.host_failures}
    names = list(lost)
    for host in names:
        counts[host] = counts.pop(host, 0) + 1  # to the end: the newest last
    if not names:
        return history
    newest = [HostFailures(host, count) for host, count in counts.items()][-MAX_HOSTS:]
    return msgspec.structs.replace(history, failures=history.failures + 1, host_failures=tuple(newest))


def add_time(history: JobHistory, change: TimedChange, seconds: float) -> JobHistory:
    """Return the history with one more measurement."""
    old = next((time for time in history.times if time.change is change), MeasuredTime(change, 0.0, 0))
    # m += (x - m) / min(n, MAX_WEIGHT): the mean at first, then an exponential one.
    count = old.count + 1
    mean_s = old.mean_s + (seconds - old.mean_s) / min(count, MAX_WEIGHT)
    others = tuple(time for time in history.times if time.change is not change)
    return msgspec.structs.replace(history, times=(*others, MeasuredTime(change, mean_s, count)))


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
        is_restored = generation.state_loss is not None or (
            generation.snapshot is not None and not generation.is_state_in_parts
        )
        change = TimedChange.RESTORE if is_restored else _TIMED[generation.change]
        if generation.slowness.divided_in == generation.number and not is_restored:
            change = TimedChange.REDIVIDE
        history = add_time(history, change, seconds)
    memory = dataclasses.replace(
        memory,
        stalled_since_s=None,
        steady_since_s=now,
        steady_step=find_newest_step(state),
        unwritten=history,
    )
    return dataclasses.replace(state, memory=memory)


def _note_returns(state: MembershipState, now: float) -> MembershipState:
    """Return the state with the times of the hosts that are ready to join again; members have returned, too."""
    generation, memory = state.generation, state.memory
    history, waiting = _get_history(state), dict(memory.lost_since_s)
    for host, since_s in memory.lost_since_s.items():
        status = state.hosts.get(host)
        if generation.find_member(host) is not None:
            del waiting[host]
        elif status is not None and is_joiner(generation, status, None):
            del waiting[host]
            history = add_time(history, TimedChange.RETURN, now - since_s)
    if len(waiting) == len(memory.lost_since_s):
        return state
    memory = dataclasses.replace(memory, lost_since_s=waiting, unwritten=history)
    return dataclasses.replace(state, memory=memory)


def _get_history(state: MembershipState) -> JobHistory:
    """Return the history with what is not written yet. No decision rests on that: another leader would not know it."""
    return state.memory.unwritten or state.generation.history
