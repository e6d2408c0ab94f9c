"""Losses and figures of the decide benchmark. Pure."""

import dataclasses
from typing import NamedTuple

import msgspec

from resilient_jax.planning.plan import Plan
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import search_plan
from resilient_jax.topology import Topology
from tests.benchmarks.decide.drawn_changes import DrawnFigures
from tests.benchmarks.plan.estimate_errors import ProgramFigures
from tests.support.plan_searches import search_unequal

DEVICES_PER_HOST = 8
SEQUENCES_PER_DEVICE = 64
"""Of a step on all devices: with fewer, whole microbatches decide what is kept, not the plan."""
FEW_SEQUENCES_PER_DEVICE = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """Devices that are lost of a number of devices, and the share of speed that should be kept."""

    lost: int
    devices: int
    aim: float

    @property
    def key(self) -> str:
        """The key of the line of JSON."""
        return f"kept_{self.lost}_of_{self.devices}"


LOSS_CASES = (
    LossCase(lost=1, devices=16, aim=0.88),
    LossCase(lost=2, devices=16, aim=0.80),
    LossCase(lost=4, devices=16, aim=0.68),
    LossCase(lost=8, devices=16, aim=0.49),
    LossCase(lost=1, devices=64, aim=63 / 64 - 0.05),
    LossCase(lost=8, devices=256, aim=248 / 256 - 0.05),
)


class KeptSpeed(NamedTuple):
    """The speed after a loss as a part of that before: of the best plan of equal replicas, and of the best of all."""

    equal: float
    best: float
    shape: str


def lose_devices(topology: Topology, lost: int) -> Topology:
    """Return the topology without devices: one of each of the last hosts, or, of too few hosts, those of the last."""
    hosts = topology.hosts
    if len(hosts) > lost > 1:
        return topology.without(*(f"{host.name}/0" for host in hosts[-lost:]))
    return topology.without(*(f"{hosts[-1].name}/{index}" for index in range(lost)))


def measure_kept_speed(cost: ProgramCost, before: Plan, now: Topology) -> KeptSpeed:
    """Return what the planner keeps of a plan's speed."""
    batch = before.global_batch
    equal = search_plan(cost, now, global_batch=batch)
    unequal = search_unequal(cost, now, global_batch=batch)
    best = equal if unequal is None or equal.step_time_s <= unequal.step_time_s else unequal
    return KeptSpeed(
        before.step_time_s / equal.step_time_s, before.step_time_s / best.step_time_s, best.shape
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class DecideFigures:
    """All measurements of the benchmark."""

    machine: str
    n: int
    kept: dict[str, KeptSpeed] = dataclasses.field(default_factory=dict)
    kept_few: dict[str, KeptSpeed] = dataclasses.field(default_factory=dict)
    search_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    search_wall_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    decision_ms: float = 0.0
    drawn: DrawnFigures | None = None
    programs: ProgramFigures | None = None

    def line(self) -> msgspec.Struct:
        """Return the line of JSON."""
        fields: dict[str, object] = {key: round(found.best, 4) for key, found in self.kept.items()}
        fields |= {f"{key}_equal": round(found.equal, 4) for key, found in self.kept.items()}
        fields |= {f"{key}_few_sequences": round(found.best, 4) for key, found in self.kept_few.items()}
        fields |= {key: round(number, 1) for key, number in (self.search_ms | self.search_wall_ms).items()}
        fields |= {"decision_ms": round(self.decision_ms, 2)}
        if self.drawn is not None:
            fields |= msgspec.structs.asdict(self.drawn)
        if self.programs is not None:
            fields |= {
                "regret": self.programs.regret,
                "rank_correlation": self.programs.rank_correlation,
                "estimate_error": self.programs.estimate_error,
                "estimate_error_calibrated": self.programs.estimate_error_calibrated,
            }
        fields |= {"n": self.n, "machine": self.machine}
        return msgspec.defstruct("DecideLine", list(fields))(**fields)
