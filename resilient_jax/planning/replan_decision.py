"""What a job would do about a change of its cluster: its decisions, one after the other, with the plans that follow."""

import dataclasses
from collections.abc import Mapping

from resilient_jax.planning.next_plans import NextPlan
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.state_migration import HostTransfer
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision, RecoveryOption


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanStep:
    """One decision that a job would make.

    Attributes:
        when: such as "when host-7 is back with 4 devices".
        choice: what the policy chose, with all options.
        before_s: seconds of a step before all changes.
        plans: the plan that runs after each action that is possible.
        unequal: a faster plan of unequal teams, which no job runs; None: there is none.
        bytes_lost: size of the state that only lost hosts held.
    """

    when: str
    choice: RecoveryDecision
    before_s: float
    plans: Mapping[RecoveryAction, NextPlan]
    unequal: NextPlan | None = None
    bytes_lost: float = 0.0

    @property
    def chosen(self) -> NextPlan:
        """The plan that runs after the choice."""
        return self.plans[self.choice.action]

    @property
    def reason(self) -> str:
        """Why, with what the cost model adds to the policy's reason."""
        sentences = [self.choice.reason]
        if self.bytes_lost:
            lost = f"{self.bytes_lost / 1e9:.3g} GB are on no worker that is left"
            sentences.append(f"{lost}, and come from a snapshot in memory, its parity, or a checkpoint")
        if not self.chosen.migration.is_exact and isinstance(self.chosen.plan, Plan):
            sentences.append("its hosts were assigned greedily, so that fewer bytes might move")
        if self.unequal is not None:
            speed = self.before_s / self.unequal.step_time_s
            sentences.append(
                f"teams that no job runs, {self.unequal.plan.shape}, would have {speed:.3f} of the speed"
            )
        return "; ".join(sentences)

    def compute_speed(self, option: RecoveryOption) -> float:
        """Return the speed after an action as a fraction of that before all changes; 0: nothing trains."""
        found = self.plans.get(option.action)
        return self.before_s / found.step_time_s if found is not None else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanDecision:
    """What a job would do about a change of its cluster.

    Attributes:
        before: the plan that ran.
        steps: the decisions, in order; none where no host has changed.
    """

    before: Plan
    steps: tuple[ReplanStep, ...]

    @property
    def plan(self) -> Plan | UnequalPlan:
        """The plan that runs in the end."""
        return self.steps[-1].chosen.plan if self.steps else self.before

    @property
    def step_time_s(self) -> float:
        """Estimated time of each step in the end."""
        return self.steps[-1].chosen.step_time_s if self.steps else self.before.step_time_s

    @property
    def transfers(self) -> tuple[HostTransfer, ...]:
        """Bytes from host to host, in all changes."""
        return tuple(move for step in self.steps for move in step.chosen.migration.transfers)

    @property
    def bytes_moved(self) -> float:
        """Bytes of the state that move over the network."""
        return sum(move.bytes_moved for move in self.transfers)

    @property
    def reason(self) -> str:
        """Why, in sentences."""
        texts = [f"{step.when[:1].upper()}{step.when[1:]}, {step.reason}." for step in self.steps]
        return " ".join(texts) or "No host has changed."
