"""Where the state of a job is: on a member, in parts on all of them, or lost from all memory."""

import enum
from collections.abc import Collection, Iterable
from typing import Final, Self

import msgspec

from resilient_jax.ids import GenerationNumber, HostName

COPY_TIMEOUT_S: Final = 60.0
"""How long blocks of a pipeline are copied, at most, before a planned change in which all members stay."""


class StateSource(msgspec.Struct, frozen=True, kw_only=True):
    """A member that has the newest state and serves it to the others.

    Attributes:
        host: the member's host.
        endpoint: the address where the member serves the state.
    """

    host: HostName
    endpoint: str


class StageLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of hosts at one moment would make of a pipeline. Speeds are parts of the present one.

    Attributes:
        hosts: hosts that are lost.
        kept: the speed with the lost hosts' stages kept, whose replicas compute nothing; 0: the others cannot do
            without these replicas.
        cut: the speed with the model cut anew over the hosts that are left.
        move_s: how long all hosts wait until blocks have moved for a new cut, in seconds.
    """

    hosts: tuple[HostName, ...]
    kept: float
    cut: float
    move_s: float


class StageOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of any hosts at one moment would make of a pipeline, by their number alone.

    Attributes:
        replicas: the hosts of each replica that computes.
        idle: the hosts of replicas that compute nothing, because a stage is kept for an absent host.
        kept: the speed as a part of the present one with so many of the replicas broken, and stages kept; the first
            number is for no broken replica. 0: no replica is left.
        cut: the speed with the model cut anew without so many hosts, as a part of the present one.
        move_s: how long all hosts wait until blocks have moved for a new cut, in seconds, if no host has the blocks
            that it needs.
    """

    replicas: tuple[tuple[HostName, ...], ...]
    idle: tuple[HostName, ...] = ()
    kept: tuple[float, ...]
    cut: tuple[float, ...]
    move_s: tuple[float, ...]

    @property
    def hosts(self) -> frozenset[HostName]:
        """All that are there."""
        return frozenset(self.idle).union(*self.replicas)

    def estimate(self, lost: Collection[HostName]) -> StageLoss | None:
        """Return what the loss of these hosts makes of the pipeline; None: of so many it is not known.

        >>> outlook = StageOutlook(replicas=(("a", "b"), ("c", "d")), kept=(1, 0.5, 0), cut=(1, 0.8), move_s=(0, 3))
        >>> outlook.estimate(["d"])
        StageLoss(hosts=('d',), kept=0.5, cut=0.8, move_s=3)
        """
        broken = sum(not set(lost).isdisjoint(replica) for replica in self.replicas)
        if len(lost) >= len(self.cut) or broken >= len(self.kept):
            return None
        number = len(lost)
        return StageLoss(
            hosts=tuple(sorted(lost)),
            kept=self.kept[broken],
            cut=self.cut[number],
            move_s=self.move_s[number],
        )


class UnitKind(enum.StrEnum):
    """What the units are that a state is divided into."""

    BLOCKS = "blocks"
    """Of a model that is cut into the stages of a pipeline."""
    RANKS = "ranks"
    """Shards by position in a replica: the host with rank r of every replica has unit r."""
    HOSTS = "hosts"
    """What one host has of a state that is sharded over all of them."""


class StatePart(msgspec.Struct, frozen=True):
    """What one worker has in memory of a state that is divided into units, such as the blocks of a model.

    Attributes:
        runs: the units that the worker has, as ranges (first, end), ascending.
        num_units: units of the state; the same on every host.
        kind: what they are; the same on every host.
        axes: names and sizes of the axes of a replica's mesh, where units are ranks: these cut the shards.
        generation: generation in which this worker had the part last.
        losses: from the first three members: what the loss of each host of that generation, or of two, would make of
            the pipeline.
        outlook: from the first nine members: what the loss of any hosts would make of it, by their number alone.
        order: from the same nine: the hosts of the pipeline's replicas in order, with those whose stages are kept.
    """

    runs: tuple[tuple[int, int], ...]
    num_units: int
    generation: GenerationNumber = GenerationNumber(0)
    losses: tuple[StageLoss, ...] = ()
    outlook: StageOutlook | None = None
    order: tuple[HostName, ...] = ()
    kind: UnitKind = UnitKind.BLOCKS
    axes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_units(
        cls,
        units: Iterable[int],
        num_units: int,
        kind: UnitKind = UnitKind.BLOCKS,
        axes: Iterable[tuple[str, int]] = (),
    ) -> Self:
        """Return the part that has these units.

        >>> StatePart.from_units([0, 1, 5], 6).runs
        ((0, 2), (5, 6))
        """
        runs: list[tuple[int, int]] = []
        for unit in sorted(units):
            if runs and runs[-1][1] == unit:
                runs[-1] = (runs[-1][0], unit + 1)
            else:
                runs.append((unit, unit + 1))
        return cls(tuple(runs), num_units, kind=kind, axes=tuple(axes))

    @property
    def cut(self) -> tuple[object, ...]:
        """How the state is cut into units: with another cut a unit of the same number is another one."""
        return self.kind, self.num_units, self.axes


class PartHolder(StateSource, frozen=True, kw_only=True):
    """A member that has a part of the state, when a generation is formed.

    Attributes:
        step: steps of the state that the part is of.
        part: the part, without `losses`, `outlook` and `order`, of which forming a world needs nothing.
    """

    step: int
    part: StatePart


def are_parts_complete(parts: Iterable[StatePart]) -> bool:
    """Return whether parts of one state have all of its units between them.

    >>> are_parts_complete([StatePart(((0, 2), (5, 6)), 6), StatePart(((1, 5),), 6)])
    True
    """
    found = tuple(parts)
    end = 0
    for first, last in sorted(run for part in found for run in part.runs):
        if first > end:
            return False
        end = max(end, last)
    return bool(found) and all(part.num_units == end for part in found)


class StateLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of a job's state from the memory of all hosts, and the state from which the job resumes.

    Attributes:
        step: how many steps were committed.
        is_lower_bound: whether more steps may have been committed, because no host is left that has committed the
            newest.
        reason: text for people: what is lost and what survives.
        checkpoint_step: the step of the newest checkpoint that a host sees on storage; None: the job restarts with its
            initial state, by the job's policy.
    """

    step: int
    is_lower_bound: bool
    reason: str
    checkpoint_step: int | None = None


class NextMembers(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts that a planned change leads to, for which the members of a pipeline copy blocks before they pause.

    Attributes:
        hosts: hosts in order of their seats. Other hosts may be members in the end: then blocks move in the pause.
        layer_speeds: speeds of hosts that get fewer layers, as parts of the speed of their peers.
        copy_timeout_s: seconds after which the members pause, whether all have their copies or not.
    """

    hosts: tuple[HostName, ...]
    layer_speeds: tuple[tuple[HostName, float], ...] = ()
    copy_timeout_s: float = 0.0
