"""Prints plans as JSON, in seconds, bytes and sequences."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import msgspec

from resilient_jax.cli.plan_changes import DecidedChange, describe_decided_change, describe_steps
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replan_decision import ReplanDecision


def print_plans_as_json(
    plans: Sequence[Plan],
    change: ReplanDecision | None,
    search_s: float,
    decided: Mapping[str, Sequence[DecidedChange]],
) -> None:
    """Print one object: the plans, fastest first, the replan, and what each possible change leads to."""
    values: dict[str, object] = {
        "search_s": search_s,
        "plans": [describe_plan(plan) for plan in plans],
        "change": None
        if change is None
        else {"reason": change.reason, "steps": describe_steps(change.steps)},
        **{key: [describe_decided_change(one) for one in changes] for key, changes in decided.items()},
    }
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
