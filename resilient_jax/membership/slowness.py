"""What a job does about slow hosts: the situation, read from the statuses, and the policy's choice of it. Pure.

The first worker of a generation reports which hosts are slow, and once that has lasted, what they cost and what each
action would make of it (`Slowdown`). A decision follows from that report, from the generation and from which hosts are
ready, so it is the same whoever leads. A host that is taken out is quarantined and leaves as after a notice. It comes
back when the quarantine is over, which lasts twice as long each time. So does a device of a host that goes on without
it: that host's agent starts the worker again on its other devices, as if the device had failed.

One host at a time: the next one is judged anew in the next generation. No host is taken out that became slow together
with another one and in the same way, whether that one is still a member or was taken out itself: what they share, a
rack or a storage, is the cause, and would slow others, too.
"""

import dataclasses
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.commands import QuarantineDevice
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.doubt import have_state
from resilient_jax.membership.facts import (
    MembershipState,
    find_seat,
    find_worker,
    has_service,
    is_on_its_way,
    list_joiners,
)
from resilient_jax.membership.host_shares import HostShares
from resilient_jax.membership.next_members import LEAVING_COPY_TIMEOUT_S, expect_members
from resilient_jax.membership.planned_pause import begin_pause
from resilient_jax.membership.spare_hosts import admit_hosts, choose_joiners, count_places, list_staying
from resilient_jax.membership.world_formation import can_change_in_place
from resilient_jax.policy.choice import choose
from resilient_jax.policy.prices import price_job
from resilient_jax.policy.situations import SlowTraining
from resilient_jax.policy.slow_host_options import count_standby_devices
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import HostFailures, RecoveryAction, RecoveryDecision
from resilient_jax.protocol.slow_hosts import COMMON_CAUSE_STEPS, DeviceTakenOut, SlowHost, SlownessRecord
from resilient_jax.protocol.state_records import COPY_TIMEOUT_S
from resilient_jax.protocol.worker_report import WorkerReport

MAX_HOSTS: Final = 64
"""Of which it is kept how often they were taken out: the last ones."""
MAX_DEVICES: Final = 64
"""Of which it is kept how often they were taken out: the last ones."""
MAX_REPORTS: Final = 16
"""Of hosts that were taken out, with which hosts that become slow later are compared: the last ones."""


def act_on_slow_host(state: MembershipState, config: MembershipConfig) -> Generation | None:
    """Return the next number, in PAUSE, or the present one with a decision to keep all hosts; None: nothing is new.

    Args:
        state: the members of the state train.
    """
    generation, decision = state.generation, decide_for_slow_host(state, config)
    if decision is None:
        return None
    slowness = msgspec.structs.replace(generation.record.slowness, decision=decision)
    if decision.action is RecoveryAction.KEEP:
        return change_fields(generation, slowness=slowness)
    if decision.action is RecoveryAction.FEWER_DEVICES:
        # The generation goes on until the host's agent ends its worker.
        slowness = _note_devices_out(slowness, decision.slow, decision.devices)
        restarting = tuple(
            (m.host, m.incarnation) for m in generation.membership.members if m.host == decision.slow
        )
        slowness = msgspec.structs.replace(slowness, restarting=(*slowness.restarting, *restarting))
        return change_fields(generation, slowness=slowness)
    taken_out: HostName | None = None
    if decision.action is RecoveryAction.REDIVIDE:
        slowdown = _get_report(state).findings.slowdown
        assert slowdown is not None, "the decision follows from it"
        number = GenerationNumber(generation.number + 1)
        slowness = msgspec.structs.replace(slowness, speeds=slowdown.speeds, divided_in=number)
    else:
        taken_out = decision.slow
        slowness = _note_taken_out(slowness, taken_out, _get_report(state).findings.slow_hosts)
    without = _suppose_without(state, taken_out) if taken_out is not None else state
    kept = [status for status in list_staying(state) if status.host != taken_out]
    timeout_s = COPY_TIMEOUT_S if taken_out is None else LEAVING_COPY_TIMEOUT_S
    next_members = expect_members(without, kept, slowness.speeds, config, timeout_s)
    pause = begin_pause(generation, decision.reason, next_members, taken_out)
    return change_fields(pause, slowness=slowness)


def decide_for_slow_host(state: MembershipState, config: MembershipConfig) -> RecoveryDecision | None:
    """Return what to do about slow hosts; None: none is slow, that was decided in this generation, or it is too soon.

    It is while a spare, which would take the place of the slow one, takes its seat, and until the slow host has started
    its worker again without devices that were taken out.

    Args:
        state: the members of the state train.
    """
    generation, report = state.generation, _get_report(state)
    slowdown = report.findings.slowdown
    if slowdown is None or slowdown.generation != generation.number or not config.act_on_slow_hosts:
        return None
    if any(host == slowdown.host for host, _ in generation.record.slowness.restarting):
        return None
    status = state.hosts.get(slowdown.host)
    slowdown = count_standby_devices(slowdown, status.devices.num_standby if status is not None else 0)
    staying = list_staying(state)
    rest = [status for status in staying if status.host != slowdown.host]
    refusal = _explain_refusal(generation, slowdown.host, report.findings.slow_hosts)
    spares: list[HostStatus] = []
    if slowdown.host and not refusal:
        without = _suppose_without(state, slowdown.host)
        spares = choose_joiners(without, rest, config)
        if not spares and _is_spare_coming(without, rest, config):
            return None
    shares, names = HostShares.of(state), {status.host for status in staying}
    places = count_places(state, staying, config.num_hosts)
    training = SlowTraining(
        places=shares.sum_complete(names) + max(places - len(names), 0),
        training=shares.sum_used(names),
        slowdown=slowdown,
        has_spare=bool(spares),
        is_spare_in_place=bool(spares) and can_change_in_place(state, rest, spares),
        can_stay_in_place=can_change_in_place(state, staying, []),
        can_shrink_in_place=can_change_in_place(state, rest, []),
        needs_restore=not have_state(generation, rest),
        refusal=refusal,
        refusal_without=_explain_refusal_without(generation, len(rest), config.min_hosts),
        refusal_fewer_devices=_explain_refusal_fewer_devices(
            state, slowdown.host, len(rest), config.min_hosts
        ),
        can_return_in_place=has_service(state)
        and generation.membership.next_seat < generation.membership.num_seats,
    )
    choice = choose(training, price_job(generation.record.history, names))
    before = generation.record.slowness.decision
    told = (generation.number, slowdown.host, choice.action)
    if before is not None and (before.number, before.slow, before.action) == told:
        return None
    return msgspec.structs.replace(
        choice,
        number=generation.number,
        reason=f"{_describe_cause(state, slowdown.host, report.findings.slow_hosts)}: {choice.reason}",
        slow=slowdown.host,
        devices=slowdown.devices if choice.action is RecoveryAction.FEWER_DEVICES else (),
    )


def list_new_quarantines(state: MembershipState, slowness: SlownessRecord) -> list[QuarantineDevice]:
    """Return the devices that are taken out by a decision which is new in the record.

    Args:
        state: the state before the record.
    """
    before, decision = state.generation.record.slowness, slowness.decision
    if decision is None or decision == before.decision or not decision.devices:
        return []
    status = state.hosts.get(decision.slow)
    uuids = status.devices.gpu_uuids if status is not None else ()
    return [
        QuarantineDevice(
            host=decision.slow,
            device=device,
            uuid=uuids[device] if device < len(uuids) else "",
            reason=decision.reason,
            num_before=before.count_device(decision.slow, device),
        )
        for device in decision.devices
    ]


def forget_outdated(generation: Generation, quarantined: frozenset[HostName]) -> Generation:
    """Return the generation with speeds, by which layers are divided, of its members alone; no member is out.

    A host whose quarantine ended before the members changed stays a member, and is not `taken_out` any more: else it
    could not be taken out again. A worker that is no member any more is not about to be started again.
    """
    slowness, taken_out = generation.record.slowness, generation.failures.taken_out
    if (
        taken_out is not None
        and taken_out not in quarantined
        and generation.membership.find_member(taken_out) is not None
    ):
        generation = change_fields(generation, taken_out=None)
    speeds = tuple(one for one in slowness.speeds if generation.membership.find_member(one[0]) is not None)
    out = tuple(host for host in slowness.out if generation.membership.find_member(host) is None)
    members = {(member.host, member.incarnation) for member in generation.membership.members}
    restarting = tuple(one for one in slowness.restarting if one in members)
    slowness = msgspec.structs.replace(slowness, speeds=speeds, out=out, restarting=restarting)
    return change_fields(generation, slowness=slowness)


def _note_taken_out(
    slowness: SlownessRecord, host: HostName, slow_hosts: tuple[SlowHost, ...]
) -> SlownessRecord:
    """Return the record with a host that is taken out now, and how it was reported."""
    counts = tuple(one for one in slowness.taken_out if one.host != host)[1 - MAX_HOSTS :]
    reports = tuple(one for one in slowness.taken_out_as if one.host != host)
    reports = (*reports, *(one for one in slow_hosts if one.host == host))[-MAX_REPORTS:]
    return msgspec.structs.replace(
        slowness,
        taken_out=(*counts, HostFailures(host, slowness.count_taken_out(host) + 1)),
        out=(*(one for one in slowness.out if one != host), host)[-MAX_HOSTS:],
        taken_out_as=reports,
    )


def _note_devices_out(slowness: SlownessRecord, host: HostName, devices: tuple[int, ...]) -> SlownessRecord:
    """Return the record with devices that are taken out now."""
    new = tuple(DeviceTakenOut(host, one, slowness.count_device(host, one) + 1) for one in devices)
    others = tuple(one for one in slowness.devices if one.host != host or one.device not in devices)
    return msgspec.structs.replace(slowness, devices=(*others, *new)[-MAX_DEVICES:])


def _get_report(state: MembershipState) -> WorkerReport:
    """Return the report of the first worker, which judges all hosts."""
    members = state.generation.membership.members
    worker = find_worker(state, members[0]) if members else None
    return worker.report if worker is not None else WorkerReport()


def _suppose_without(state: MembershipState, slow: HostName) -> MembershipState:
    """Return the state as it would be if the slow host were taken out now: those that join then are known from it."""
    slowness = _note_taken_out(state.generation.record.slowness, slow, ())
    generation = change_fields(state.generation, slowness=slowness)
    return dataclasses.replace(state, generation=generation, quarantined=state.quarantined | {slow})


def _is_spare_coming(without: MembershipState, rest: list[HostStatus], config: MembershipConfig) -> bool:
    """Return whether a host that would have the place of the slow one is given a seat, or takes it, just now.

    Args:
        without: the state as if the slow host were taken out.
    """
    preparing = [
        status
        for host, status in sorted(without.hosts.items())
        if host not in without.quarantined
        and is_on_its_way(status)
        and find_seat(without.generation, status) is not None
    ]
    return bool(admit_hosts(without, rest, [*list_joiners(without), *preparing], config.num_hosts)[0])


def _explain_refusal(generation: Generation, slow: HostName, slow_hosts: tuple[SlowHost, ...]) -> str:
    """Return why a slow host may not be taken out now; empty: it may."""
    if not generation.record.losses_left:
        return "the next loss may be that of the state"
    found = next((one for one in slow_hosts if one.host == slow), None)
    if found is None or generation.membership.find_member(slow) is None:
        return "it is not slow any more, or no member"
    # A host may be reported only after another one was taken out that became slow at the same time.
    others = {
        one.host: None  # in this order, each once
        for one in (*slow_hosts, *generation.record.slowness.taken_out_as)
        if one.host != slow
        and one.kind == found.kind
        and abs(one.since_step - found.since_step) <= COMMON_CAUSE_STEPS
    }
    return f"{', '.join(others)} became slow with it, so that the cause is not in the host" if others else ""


def _explain_refusal_without(generation: Generation, num_left: int, min_hosts: int) -> str:
    """Return why the job may not go on with a host less; empty: it may."""
    if num_left < max(min_hosts, 1):
        return f"fewer than min_hosts = {max(min_hosts, 1)} would be left"
    # The host that leaves uses one of them up.
    if generation.record.losses_left is not None and generation.record.losses_left < 2:
        return "the next loss after it might be that of the state"
    return ""


def _explain_refusal_fewer_devices(
    state: MembershipState, slow: HostName, num_left: int, min_hosts: int
) -> str:
    """Return why a slow host's worker may not be started again on fewer devices; empty: it may."""
    generation, status = state.generation, state.hosts.get(slow)
    if status is None or generation.membership.find_member(slow) is None:
        return "it is no member"
    if not status.devices.num_devices:
        return "its agent does not know how many devices it has"
    # Its agent ends no worker with the last copy of the state: `may_replace`.
    if generation.record.losses_left is not None and not (generation.record.losses_left and num_left):
        return "the next loss may be that of the state"
    if num_left < max(min_hosts, 1):
        return f"fewer than min_hosts = {max(min_hosts, 1)} would train until its worker has started again"
    return ""


def _describe_cause(state: MembershipState, slow: HostName, slow_hosts: tuple[SlowHost, ...]) -> str:
    found = next((one for one in slow_hosts if one.host == slow), None)
    if found is None:
        return "hosts are as fast as their peers again"
    status = state.hosts.get(slow)
    # What the driver says of its GPUs, such as that one is too hot.
    notes = status.devices.gpus if status is not None else ()
    return "; ".join((f"{slow} is {found.describe()}", *notes))
