"""A plan whose replicas differ: teams with their own axes, hosts, stages, splits and quotas; every device can work."""

import dataclasses
from collections.abc import Sequence

from resilient_jax.pipeline_schedule.makespan import MachineClass, assign_tasks
from resilient_jax.planning.pipeline import find_weight_share, time_pipeline
from resilient_jax.planning.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Equal replicas on a part of the devices.

    Attributes:
        plan: plan of the team's devices alone; its topology has only the team's hosts, each with the devices that the
            team uses.
        microbatches: microbatches of the team in a step, each of `plan.microbatch_sequences` sequences.
    """

    plan: Plan
    microbatches: int

    @property
    def sequences(self) -> int:
        """The team's sequences of a step."""
        return self.microbatches * self.plan.microbatch_sequences

    @property
    def makespan_s(self) -> float:
        """Time until all its replicas have computed their microbatches."""
        return assign_tasks(self.microbatches, list_machines(self.plan)).makespan_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnequalPlan:
    """Teams that compute a step together; all wait for the slowest, and add up their gradients.

    Attributes:
        teams: teams in the order of their devices.
        global_batch: sequences in a step, of all teams together.
        device_count: devices of the topology, used or not.
        optimizer_s: the update, with the overhead of a step.
    """

    teams: tuple[Team, ...]
    global_batch: int
    device_count: int
    gradient_all_reduce_s: float
    optimizer_s: float
    reason: str = ""

    @property
    def step_time_s(self) -> float:
        """The estimated time of one step."""
        return max(team.makespan_s for team in self.teams) + self.gradient_all_reduce_s + self.optimizer_s

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return sum(team.plan.replicas for team in self.teams)

    @property
    def devices_spare(self) -> int:
        """Devices that are left out."""
        return self.device_count - sum(team.plan.devices_used for team in self.teams)

    @property
    def shape(self) -> str:
        """The axes of each team in words, such as "fsdp 8 and pipeline 7"."""
        return " and ".join(team.plan.shape for team in self.teams)


def list_machines(plan: Plan) -> list[MachineClass]:
    """Return the replicas of a plan as machines that compute microbatches."""
    found = []
    for one in plan.replica_classes:
        time = time_pipeline(
            plan.layout.axes.pipeline,
            one.stage_s,
            one.transfer_s,
            weight_share=find_weight_share(is_remat=plan.microbatch.remat),
            repeats=plan.pipeline_repeats,
        )
        found.append(time.as_machines(one.replicas))
    return found


def explain_teams(teams: Sequence[Team]) -> str:
    """Return what each team computes, in a sentence."""
    named = "; ".join(
        f"{team.plan.shape} on {team.plan.device_count} devices, {team.sequences} sequences in "
        f"{team.microbatches} microbatches, {team.makespan_s:.3g} s"
        for team in teams
    )
    return f"Unequal teams: {named}."
