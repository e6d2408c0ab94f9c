"""An agent's orders for its standby, a part of `generation_orders`. Pure.

Such a standby is a worker, with a connection and an incarnation of its own, but no member:

| generation, or event           | for a standby that was given a seat      | for one without |
|--------------------------------|------------------------------------------|-----------------|
| older                          | refused                                  | refused         |
| FINISHED, or the host leaves   | `DismissStandby`                         | `DismissStandby`|
| ACTIVE                         | `SendStandbyToSeat`                      | `Quiesce`       |
| other phases                   | none: what it does is of no generation   | `Quiesce`       |
| it could not take its seat     | `FailStandby`                            | -               |
| the worker has died            | `TakeOver`: it is the host's worker      | `TakeOver`      |

Rules:
- A standby takes over only when it is past the top of the script, is not stopped, and the worker did not end with an
  error of the script's own. From then on it is the worker, by its incarnation: what was decided about its predecessor,
  such as a deadline, does not concern it.
"""

import dataclasses

from resilient_jax.cluster.worker_view import WorkerView
from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import Generation, GenerationPhase, SeatId
from resilient_jax.protocol.worker_messages import Quiesce
from resilient_jax.protocol.worker_report import WorkerFailureKind, WorkerState


@dataclasses.dataclass(frozen=True, slots=True)
class SendStandbyToSeat:
    """Send the standby a `TakeSeat`, with a relay to the world's service."""

    generation: Generation


@dataclasses.dataclass(frozen=True, slots=True)
class OrderStandby:
    """Send the standby this order."""

    order: Quiesce


@dataclasses.dataclass(frozen=True, slots=True)
class DismissStandby:
    """End the standby, which is not needed any more, and start no other."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailStandby:
    """End the standby, which is of no use; another is started later."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class TakeOver:
    """Have the standby be the host's worker from now on."""


StandbyCommand = OrderStandby | DismissStandby | FailStandby | TakeOver


def order_standby(
    generation: Generation, standby: WorkerView, host: HostName
) -> tuple[SendStandbyToSeat | StandbyCommand, ...]:
    """Return what a generation, which is not older than another that was read, means for the host's standby."""
    if generation.phase is GenerationPhase.FINISHED:
        return (DismissStandby(),)
    if generation.membership.find_newcomer(host, standby.incarnation) is None:
        return (OrderStandby(Quiesce(generation=generation.number, reason="it has no seat")),)
    return (SendStandbyToSeat(generation),) if generation.phase is GenerationPhase.ACTIVE else ()


def react_to_change(
    generation: Generation | None, worker: WorkerView | None, standby: WorkerView, host: HostName
) -> tuple[StandbyCommand, ...]:
    """Return what follows a change of the worker, or of the standby."""
    if worker is not None and worker.is_dead:
        return (TakeOver(),) if _can_take_over(worker, standby) else ()
    if generation is not None and _has_missed_seat(generation, standby, host):
        return (FailStandby("it could not take its seat"),)
    return ()


def _can_take_over(worker: WorkerView, standby: WorkerView) -> bool:
    """Return whether a standby replaces a worker that has died."""
    failure = worker.report.failure
    if failure is not None and failure.kind is WorkerFailureKind.USER:
        return False  # the leader is to see it first
    # One that starts may be about to fail, and its error would count as the worker's.
    is_past_script = standby.report.state in (WorkerState.IDLE, WorkerState.PREPARING)
    return is_past_script and not standby.is_unresponsive


def _has_missed_seat(generation: Generation, standby: WorkerView, host: HostName) -> bool:
    """Return whether a standby has tried to take the seat that it was given, and is not in the world."""
    newcomer = generation.membership.find_newcomer(host, standby.incarnation)
    report = standby.report
    if newcomer is None or report.state is not WorkerState.IDLE:
        return False
    return (
        report.place.seat == SeatId(generation.membership.world, newcomer.seat)
        and report.place.world != generation.membership.world
    )
