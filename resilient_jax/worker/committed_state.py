"""The committed state and the sums of the step in flight: what a worker keeps from one generation to the next."""

from collections.abc import Sequence
from typing import Any

from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationScoped
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.protocol.state_records import StatePart, UnitKind
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.held_shards import HeldShards, find_part_of_state
from resilient_jax.step.contributions import Contributions
from resilient_jax.step.measured_seconds import MeasuredSeconds
from resilient_jax.worker.audit_record import AuditRecord
from resilient_jax.worker.host_health import HealthRecord
from resilient_jax.worker.step_results import StepResults


class KeptArrays(GenerationScoped):
    """Arrays on devices that a train function keeps from one generation to the next by itself.

    They are what it has done of the step under way, and its part of a state that the hosts have in parts. The handover
    of the state tells them whether they leave the devices or are of no use, as the state that they belong to.
    """

    @property
    def part(self) -> StatePart | None:
        """The part of the newest state that is here; None: nothing, or it is not known to be of that state."""
        return None

    def drop(self, *, keeps_copies: bool = False) -> None:
        """Drop all arrays: what was done is of no use any more.

        Args:
            keeps_copies: True: copies stay of what the others have, made for this change of members.
        """


class CommittedState:
    """What outlives a generation; one object for the life of the worker.

    Attributes:
        state: the state after the last committed step; None while there is none, or while it is in a snapshot.
        snapshot_plan: where the state is until `World.restore_or_init` has read the state from there.
        parts_step: steps of the state whose parts members have in their `kept` arrays, or as `shards`, until the train
            function has placed the state; None: the state is elsewhere.
        shards: this host's shards of that state; None: it has none.
        results: what all hosts have found together in the last steps.
        contributions: what this host has accumulated for the step in flight, by accumulation.
        kept: arrays that train functions keep by themselves.
        measured_speeds: measured speeds of this host, by accumulation.
        audits: how far the computations of each host are verified.
        health: which hosts are slow; None: this host was not the first of a generation.
        first_step: the step that this job begins with, if the job resumes from an earlier job's checkpoint.
    """

    def __init__(self) -> None:
        self.state: FlatState | None = None
        self.snapshot_plan: SnapshotPlan | None = None
        self.parts_step: int | None = None
        self.shards: HeldShards | None = None
        self._part_of_state: StatePart | None = None
        """The part that `state` is, or was before it was handed over."""
        self.results = StepResults()
        self.contributions: dict[str, Contributions] = {}
        self.kept: list[KeptArrays] = []
        self.measured_speeds: dict[str, MeasuredSeconds[str]] = {}
        self.audits = AuditRecord()
        self.health: HealthRecord | None = None
        self.first_step = 0

    @property
    def step(self) -> int:
        """The number of committed steps."""
        if self.snapshot_plan is not None:
            return self.snapshot_plan.id.step
        if self.parts_step is not None:
            return self.parts_step
        return self.state.step if self.state is not None else self.first_step

    @property
    def is_empty(self) -> bool:
        """Whether there is no committed state."""
        return self.state is None and self.snapshot_plan is None and self.parts_step is None

    @property
    def holds_state(self) -> bool:
        """Whether this host has all of the committed state in its own memory."""
        return self.state is not None and self.state.is_complete

    def keep_result(self, name: str, arrays: Sequence[Any]) -> None:
        """Keep what a call gave all hosts, if hosts may need it to finish the step: they have shards, on replicas.

        Before the first step it is not known what they have.
        """
        part = self._part_of_state
        if not self.results.is_step_begun or (part is not None and part.kind is UnitKind.RANKS):
            self.results.add(name, arrays)

    @property
    def part(self) -> StatePart | None:
        """What this host has of a state that the hosts have in parts; None while the state is that of a snapshot."""
        if self.snapshot_plan is not None:
            return None
        of_blocks = next((part for kept in self.kept if (part := kept.part) is not None), None)
        if of_blocks is not None:
            return of_blocks
        if self.shards is not None:
            return self.shards.part
        return self._part_of_state if self.state is not None else None

    def set_state(self, state: FlatState) -> None:
        """Make a state in this host's arrays the committed one."""
        self.state, self.snapshot_plan, self.parts_step, self.shards = state, None, None, None
        self._part_of_state = find_part_of_state(state)

    def set_snapshot_plan(self, plan: SnapshotPlan) -> None:
        """Make a snapshot the committed state. Contributions to its step stay valid."""
        self.state, self.snapshot_plan, self.parts_step, self.shards = None, plan, None, None

    def set_parts(self, step: int) -> None:
        """Make what the members have in parts the committed state, after about `step` steps."""
        part = self.part
        if self.shards is None and part is not None and part.kind is not UnitKind.BLOCKS:
            self.shards = HeldShards(part, self.state)
        self.state, self.snapshot_plan, self.parts_step = None, None, step

    def move_contributions_to_host(self) -> None:
        """Copy all contributions to host memory, before the devices' backend is destroyed."""
        for contributions in self.contributions.values():
            contributions.move_to_host()
        self.results.move_to_host()

    def have_kept_leave(self, generation: Generation) -> None:
        """Copy the arrays that train functions keep by themselves to host memory, before the backend is destroyed."""
        for kept in self.kept:
            kept.leave_devices(generation)

    def clear(self, *, keeps_copies: bool = False) -> None:
        """Drop everything: the valid state is on other hosts, or there is none.

        Args:
            keeps_copies: True: copies stay that were made of the others' state, for this host.
        """
        self.state, self.snapshot_plan, self.parts_step, self.shards = None, None, None, None
        self.contributions.clear()
        self.results.clear()
        self.drop_kept(keeps_copies=keeps_copies)
        self.first_step = 0

    def drop_kept(self, *, keeps_copies: bool = False) -> None:
        """Drop the arrays that train functions keep by themselves."""
        for kept in self.kept:
            kept.drop(keeps_copies=keeps_copies)
