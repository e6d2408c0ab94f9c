"""Prints plans as JSON, in seconds, bytes and sequences."""

import dataclasses
import sys
from collections.abc import Sequence

import msgspec

from resilient_jax.cli.plan_losses import LossDecision, describe_loss
from resilient_jax.cli.plan_slow_hosts import SlowDecision, describe_slow_host
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replanning import ReplanDecision, ReplanOption
from resilient_jax.planning.unequal_plan import UnequalPlan


def print_plans_as_json(
    plans: Sequence[Plan],
    change: ReplanDecision | None,
    search_s: float,
    losses: Sequence[LossDecision] | None = None,
    slow_hosts: Sequence[SlowDecision] | None = None,
) -> None:
    """Print one object: the plans, fastest first, the replan, and what each possible loss or slow host leads to."""
    values: dict[str, object] = {
        "search_s": search_s,
        "plans": [describe_plan(plan) for plan in plans],
        "change": None if change is None else _describe_change(change),
    }
    if losses is not None:
        values["losses"] = [describe_loss(loss) for loss in losses]
    if slow_hosts is not None:
        values["slow"] = [describe_slow_host(decision) for decision in slow_hosts]
    sys.stdout.write(msgspec.json.encode(values).decode() + "\n")


def describe_plan(plan: Plan) -> dict[str, object]:
    """Return all fields of a plan in types that JSON has."""
    return {
        "model": plan.model_name,
        "topology": plan.topology_name,
        "axes": {str(axis): size for axis, size in plan.axis_sizes.items()},
        "microbatch_sequences": plan.microbatch_sequences,
        "sequences_per_device": plan.microbatch.sequences,
        "remat": plan.microbatch.remat,
        "replica_classes": [dataclasses.asdict(team) for team in plan.replica_classes],
        "hosts": [dataclasses.asdict(span) for span in plan.hosts],
        "spares": [dataclasses.asdict(span) for span in plan.spares],
        "devices_used": plan.devices_used,
        "devices_spare": plan.devices_spare,
        "step_time_s": plan.step_time_s,
        "step_s": plan.step_breakdown.by_term(),
        "memory_bytes": plan.memory.total,
        "memory_by_term_bytes": dataclasses.asdict(plan.memory),
        "usable_bytes": plan.usable_bytes,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.model_flops_utilization,
        "reason": plan.reason,
    }


def _describe_change(change: ReplanDecision) -> dict[str, object]:
    return {
        "reason": change.reason,
        "next_failure_s": change.next_failure_s,
        "options": [_describe_option(option) for option in (change.chosen, *change.others)],
        "moves": [dataclasses.asdict(move) for move in change.transfers],
    }


def _describe_option(option: ReplanOption) -> dict[str, object]:
    teams = option.plan.teams if isinstance(option.plan, UnequalPlan) else ()
    return {
        "action": option.action,
        "teams": [
            {
                "shape": team.plan.shape,
                "hosts": [dataclasses.asdict(span) for span in team.plan.hosts],
                "microbatches": team.microbatches,
                "sequences": team.sequences,
            }
            for team in teams
        ],
        "shape": option.plan.shape,
        "step_time_s": option.step_time_s,
        "search_s": option.search_s,
        "compile_s": option.compile_s,
        "migration_s": option.migration_s,
        "bytes_moved": option.migration.bytes_moved,
        "bytes_lost": option.migration.bytes_lost,
        "score": option.score,
    }
