"""The time of a decision at a change of members, in a job of thousands of hosts."""

import time
from typing import Final

from resilient_jax.ids import GenerationNumber, Seat, WorldId
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.recovery_decision import decide_admission, decide_after_loss
from resilient_jax.membership.world_formation import find_state_origin
from resilient_jax.protocol.generation import Generation, GenerationPhase, LeaderNotes, Member, Membership
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.worker_report import WorkerState
from tests.support.stub_hosts import change_report, make_idle_status

DECISION_HOSTS: Final = 4096
AIM_MS: Final = 20.0


def measure_decision_ms(num_hosts: int) -> float:
    """Return the processor time of the slower of two decisions: after the loss of a host, and when it is back."""
    lost, *others = [make_idle_status(index) for index in range(num_hosts)]
    kept = [
        change_report(status, holds_state=True, step=9, generation=GenerationNumber(2), world=WorldId(1))
        for status in others
    ]
    config = MembershipConfig(num_hosts=num_hosts, spare_seats=32)
    after_loss = _make_state(
        [change_report(lost, state=WorkerState.STARTING), *kept], kept, GenerationPhase.QUIESCE
    )
    origin = find_state_origin(after_loss, kept, [])
    began_s = time.process_time()
    decide_after_loss(after_loss, kept, [], origin, 1.0, config)
    decided_s = time.process_time()
    is_back = _make_state([lost, *kept], kept, GenerationPhase.ACTIVE)
    returned_s = time.process_time()
    decide_admission(is_back, [lost], 1.0, config)
    return 1e3 * max(decided_s - began_s, time.process_time() - returned_s)


def _make_state(
    statuses: list[HostStatus], members: list[HostStatus], phase: GenerationPhase
) -> MembershipState:
    generation = Generation(
        number=GenerationNumber(2),
        phase=phase,
        membership=Membership(
            world=WorldId(1),
            members=tuple(
                Member(host=status.host, incarnation=status.worker.incarnation, seat=Seat(seat))
                for seat, status in enumerate(members)
                if status.worker is not None
            ),
        ),
        record=LeaderNotes(progress=9, losses_left=len(members) - 1),
    )
    hosts = {status.host: status for status in statuses}
    return MembershipState(generation=generation, hosts=hosts, phase_since_s=0.0)
