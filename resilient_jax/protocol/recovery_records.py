"""What a job's leader decided at a change of members, and what the decision rests on; kept in the generation."""

import enum
import statistics
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.plan_records import PlanAxes

MAX_FORESEEN_HOSTS: Final = 8
"""Lost at one moment, or joining: of so many, members estimate ahead what that would make. One member more than these
reports it, so that one is left whichever are lost."""


class RecoveryAction(enum.StrEnum):
    """What to do at a change of members."""

    # after a loss
    SHRINK = "shrink"
    """Go on in place with the hosts that are left."""
    KEEP_STAGES = "keep_stages"
    """Go on in place without moving blocks of a pipeline: the stage of the lost host is kept, and its replica computes
    nothing until the host is back, or others have copies of its blocks."""
    KEEP_AXES = "keep_axes"
    """Go on in place with the axes that the job has, for which nothing is compiled, and not with those of the best plan
    for the hosts that are left; or have hosts that are ready join so."""
    REPLACE = "replace"
    """Go on in place, with spares, standbys or other hosts in their seats in the places of those that were lost."""
    REFORM = "reform"
    """Go on in a new world with the hosts that are ready; those that have loaded no programs prepare in its seats, and
    join when they have."""
    REFORM_COLD = "reform_cold"
    """Go on in a new world with all hosts that are ready: all wait for those that have loaded no programs."""
    RESTORE = "restore"
    """Go on from an older state: that of a snapshot, or of a checkpoint."""
    WAIT = "wait"
    """Wait for hosts that are on their way back, without training."""
    STOP = "stop"
    """End the job."""
    # while others train
    JOIN = "join"
    """Have the hosts that are ready join at the next step boundary."""
    GATHER = "gather"
    """Train on until more hosts are ready, and have all join in one pause."""
    POSTPONE = "postpone"
    """Train on without the hosts that are ready, until the next change or until their joining pays."""
    # while a host is slow, or no longer is
    KEEP = "keep"
    """Train on with all hosts, and what they have to do as it is. To `REPLACE` a slow host is another option."""
    TAKE_OUT = "take_out"
    """Train on without the slow host."""
    FEWER_DEVICES = "fewer_devices"
    """Train on without the slow devices of a host, which starts its worker again on its other ones."""
    REDIVIDE = "redivide"
    """Divide a pipeline's layers anew, by the speeds that hosts have now."""


class NeededHosts(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """How many hosts training needs, as members have found it. Of two words the greater one counts.

    Attributes:
        generation: the generation in which they found it.
        count: fewer hosts cannot train, since one replica spans so many.
        num_hosts: how many they were. Fewer may train: a planner may have another plan for these.
        step: the step that they were at. Later ones may need fewer hosts.
    """

    generation: GenerationNumber = GenerationNumber(0)
    count: int = 1
    num_hosts: int = 0
    step: int = 0


WAITING_ACTIONS = frozenset({RecoveryAction.WAIT, RecoveryAction.GATHER, RecoveryAction.POSTPONE})
"""The actions that change no members, and are looked at again."""
JOINING_ACTIONS = frozenset({RecoveryAction.JOIN, RecoveryAction.KEEP_AXES})
"""The actions with which hosts that are ready join others that train."""
KEEPING_ACTIONS = frozenset({RecoveryAction.KEEP_STAGES, RecoveryAction.KEEP_AXES})
"""The actions with which a job has less than the best speed of its hosts, until others are back or a wait is over."""


class RecoveryOption(msgspec.Struct, frozen=True, kw_only=True):
    """One action with its price.

    Attributes:
        action: what the job does.
        score: Chameleon's score: the mean speed until the next failure, as a part of that of all the job's hosts.
        pause_s: how long no host trains at first.
        speed: speed after the pause, as a part of the speed of all the job's hosts.
        why_not: why the action is not possible; empty: the action is possible.
    """

    action: RecoveryAction
    score: float
    pause_s: float
    speed: float
    why_not: str = ""

    def describe(self) -> str:
        """Return a text such as "shrink: score 0.749731, 0.75 of full speed after 0.2 s"."""
        text = f"{self.action}: score {self.score:.6f}, {self.describe_speed()}"
        return f"{text} (not possible: {self.why_not})" if self.why_not else text

    def describe_speed(self) -> str:
        """Return a text such as "0.75 of full speed after 0.2 s"."""
        return f"{self.speed:.3g} of full speed after {self.pause_s:.2g} s"


class RecoveryDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The choice at one change.

    Attributes:
        action: the option that was chosen.
        number: the number of the generation that stood; 0: it is the choice of a plan, not of a job.
        reason: one sentence for people.
        options: all options, the chosen one first, then by score.
        next_failure_s: the expected time to the next failure.
        joining: for a choice while others train: the hosts that are ready to join.
        awaited: the hosts that are waited for.
        wait_s: how long hosts are waited for, or how long until the choice is looked at again; 0: the action is carried
            out. A stage that is kept with 0 is given up as soon as others have copies of its blocks.
        slow: for a choice about slow hosts: the slowest host; empty: none is slow.
        devices: for `FEWER_DEVICES`: the numbers of the slow host's devices that are taken out.
        stage_hosts: for a choice to keep stages: the hosts of all replicas in order, the lost host among them.
        plan_axes: in a job with planned axes, where they are known: the axes of the next generation.
        has_new_axes: whether `plan_axes` are others than before.
        prepare_s: how long the programs of those axes were expected to take, in seconds; 0: the programs were ready.
    """

    action: RecoveryAction
    number: GenerationNumber = GenerationNumber(0)
    reason: str
    options: tuple[RecoveryOption, ...] = ()
    next_failure_s: float = 0.0
    joining: tuple[HostName, ...] = ()
    awaited: tuple[HostName, ...] = ()
    wait_s: float = 0.0
    slow: HostName = HostName("")
    devices: tuple[int, ...] = ()
    stage_hosts: tuple[HostName, ...] = ()
    plan_axes: PlanAxes = ()
    has_new_axes: bool = False
    prepare_s: float = 0.0


class TimedChange(enum.StrEnum):
    """What the leader measures the time of."""

    SHRINK = "shrink"
    """From the loss of a host to the end of the next step, less a step, in place with those that are left."""
    KEEP_STAGES = "keep_stages"
    """The same with the stage of the lost host kept."""
    NEW_AXES = "new_axes"
    """The same with other planned axes, whose programs are ready: the state is placed anew."""
    GROW = "grow"
    """The same for a change in place with hosts that join."""
    REFORM = "reform"
    """The same for a change by a re-form."""
    REFORM_COLD = "reform_cold"
    """The same for a re-form with hosts that had loaded no programs, for which all others wait."""
    RESTORE = "restore"
    """The same for a change in which the state is read from a snapshot or a checkpoint."""
    REDIVIDE = "redivide"
    """The same for a change in which layers are divided anew, and all members stay: by their speeds, or since a stage
    is kept no longer."""
    RETURN = "return"
    """From the loss of a host's worker until the host is ready to join again."""


class MeasuredTime(msgspec.Struct, frozen=True):
    """A time that was measured in this job.

    Attributes:
        change: what the time was measured of.
        recent_s: the last few measurements, the newest last.
        count: how often the time was measured.
    """

    change: TimedChange
    recent_s: tuple[float, ...]
    count: int

    @property
    def typical_s(self) -> float:
        """The median of the last few, of two the smaller one: a machine that is busy for a while makes times longer.

        >>> MeasuredTime(TimedChange.GROW, (0.6, 9.0, 0.5), 3).typical_s
        0.6
        """
        return statistics.median_low(self.recent_s)


class HostFailures(msgspec.Struct, frozen=True):
    """How often something happened to a host.

    Attributes:
        host: name of the affected host.
        count: how often the event happened.
    """

    host: HostName
    count: int


class LossCause(enum.StrEnum):
    """Why a member was lost, or left, as far as its leader sees it."""

    WORKER = "worker"
    """Its worker ended, by its own error or by a signal."""
    HOST = "host"
    """Its agent or its machine is gone, without a notice."""
    DEVICE = "device"
    """A device failed, and the worker was ended because of it."""
    LEFT_OUT = "left_out"
    """It kept the others waiting, or its collectives failed."""
    NOTICE = "notice"
    """It left after a notice (preemption, or a drain): no failure."""


class LossRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How often a host was lost for one cause, and how soon it was back.

    Attributes:
        cause: cause of the losses.
        host: the host; empty: any host.
        count: number of losses.
        moments: number of losses, where of several hosts that were lost at one moment each counts a part.
        recent: number of losses, where a loss counts the less the longer ago it was (`failure_forecast.RECENT_S`), at
            `last_s`.
        last_s: when the last loss was, in seconds of `JobHistory.observed_s`.
        return_s: the mean time until the host was ready to join again, in which the last few count most.
        num_returns: how often a return was measured.
        streak: for one host: losses in a row, up to now. A host that is lost before it is back begins anew.
    """

    cause: LossCause
    host: HostName = HostName("")
    count: int = 0
    moments: float = 0.0
    recent: float = 0.0
    last_s: float = 0.0
    return_s: float = 0.0
    num_returns: int = 0
    streak: int = 0


class Absence(msgspec.Struct, frozen=True, kw_only=True):
    """A host that was lost, or has left, and is no member again yet.

    Attributes:
        host: name of the absent host.
        cause: cause of the loss or leave.
        number: number of the generation without the host.
    """

    host: HostName
    cause: LossCause
    number: GenerationNumber


class JobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What leaders have seen of a job so far; each passes it on to the next in the generation.

    Attributes:
        observed_s: seconds for which the job was watched.
        failures: how many losses of members there were; a loss of several members at once counts once. Members that
            left after a notice do not count.
        losses: losses by cause, of all hosts.
        host_losses: losses by host and cause, the newest last.
        away: the hosts that are away now.
        step_s: the time of a step; 0: not known yet.
        times: times of changes.
    """

    observed_s: float = 0.0
    failures: int = 0
    losses: tuple[LossRecord, ...] = ()
    host_losses: tuple[LossRecord, ...] = ()
    away: tuple[Absence, ...] = ()
    step_s: float = 0.0
    times: tuple[MeasuredTime, ...] = ()
