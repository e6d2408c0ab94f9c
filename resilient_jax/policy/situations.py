"""The situations in which there is something to choose. A reader makes them of a job's statuses, or of a plan.

Hosts are counted by their devices: one that works with half of them is half a host.
"""

import dataclasses

from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.protocol.plan_records import PlanChange
from resilient_jax.protocol.recovery_records import RecoveryAction
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.protocol.state_records import StageLoss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The members are idle after a loss, and know who is left.

    Attributes:
        places: the hosts that the job has at most.
        ready: the hosts that can go on now.
        num_seated: ready hosts that were no members before.
        num_cold: seated hosts that have loaded no programs, for which all would wait in a new world.
        cold_join_because: why cold hosts cannot prepare in a seat of the new world and join then; empty if they can.
        num_lost: hosts lost at one moment, counted as they were before.
        awaited: the hosts that are expected back, the soonest first.
        new_world_because: why the ready hosts cannot go on in their world; empty if they can.
        can_join_in_place: whether hosts that come later will have seats in the world of the ready ones.
        needs_restore: whether no host has the newest state, only a snapshot or a checkpoint.
        may_wait: whether the job may wait; the rules allow it once in a change.
        stage: what the loss makes of a pipeline; None: unknown.
        plan: what the loss makes of planned axes; None: unknown.
        has_new_axes: whether the best axes for the hosts that are left are others than the job has.
        stage_return_s: until the one host of `stage` is expected to be ready, in seconds; None: that host is not
            awaited, or there are several lost hosts, whose stages are kept until their blocks are copied.
    """

    places: float
    ready: float
    num_seated: float = 0
    num_cold: float = 0
    cold_join_because: str = ""
    num_lost: float = 1
    awaited: tuple[ExpectedReturn, ...] = ()
    new_world_because: str = ""
    can_join_in_place: bool = True
    needs_restore: bool = False
    may_wait: bool = True
    stage: StageLoss | None = None
    plan: PlanChange | None = None
    has_new_axes: bool = False
    stage_return_s: float | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether those that are ready can go on in their world."""
        return not self.new_world_because

    @property
    def present_speed(self) -> float:
        """The speed before the loss, as a part of that of all hosts."""
        return (self.ready + self.num_lost) / self.places


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Hosts are ready to join while others train.

    Attributes:
        places: hosts that the job has at most.
        training: the hosts that train.
        awaited: the other hosts that are expected back, the soonest first.
        new_world_because: why the ready hosts cannot join in place; empty if they can.
        is_last_copy: whether the next loss may be that of the state.
        has_stage: whether the stage of a ready host was kept for it.
        before: what was chosen for the same hosts before; None: nothing was.
        plan: what the change makes of planned axes; None: unknown.
        has_new_axes: whether the best axes with the hosts that join are others than the job has.
    """

    places: float
    training: float
    joining: float
    awaited: tuple[ExpectedReturn, ...] = ()
    new_world_because: str = ""
    is_last_copy: bool = False
    has_stage: bool = False
    before: RecoveryAction | None = None
    plan: PlanChange | None = None
    has_new_axes: bool = False

    @property
    def can_join_in_place(self) -> bool:
        """Whether those that are ready have taken seats of the world in which the others train."""
        return not self.new_world_because


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowTraining:
    """Hosts train, and slow ones among them, or a division of layers by speeds of the past, cost them time.

    Attributes:
        places: hosts that the job has at most.
        training: the hosts that train; as `places` counted by their devices.
        slowdown: what is slow, and what each action makes of it.
        is_spare_in_place: whether the spare has a seat of the world of those that train.
        can_stay_in_place: whether all hosts that train can go on in their world.
        can_shrink_in_place: whether they can go on in their world without the slow host.
        needs_restore: whether the state of the slow host is on no other one, so that it is read from a snapshot.
        refusal: why no host may be taken out now; empty: one may.
        refusal_without: why the other hosts may not go on without the slow host; empty: they may.
        refusal_fewer_devices: why the worker of the slow host may not be started again on fewer devices; empty: it may.
        can_return_in_place: whether the worker that is started again will have a seat in their world.
    """

    places: float
    training: float
    slowdown: Slowdown
    has_spare: bool = False
    is_spare_in_place: bool = True
    can_stay_in_place: bool = True
    can_shrink_in_place: bool = True
    needs_restore: bool = False
    refusal: str = ""
    refusal_without: str = ""
    refusal_fewer_devices: str = ""
    can_return_in_place: bool = True


Situation = Loss | Admission | SlowTraining
