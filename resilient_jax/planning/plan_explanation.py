"""Why a plan was chosen, in sentences."""

import dataclasses
from collections.abc import Sequence

from resilient_jax.planning.plan import Plan

_SHOWN = 0.005
"""Terms with a smaller part of the step are omitted."""
_EVEN = 0.9
"""A batch divides evenly enough if the devices compute for this part of the longest replica's time."""


def explain_choice(plans: Sequence[Plan], min_replicas: int = 1) -> tuple[Plan, ...]:
    """Return the plans with their reasons: comparison with the others, what limits the step, what is left out.

    Args:
        plans: the fastest first.
    """
    explained = []
    for place, plan in enumerate(plans):
        reasons = [_compare(plan, plans, place, min_replicas), _limits(plan)]
        reasons += [text for text in (_spares(plan), _speeds(plan), _uneven(plan)) if text]
        explained.append(dataclasses.replace(plan, reasons=tuple(reasons)))
    return tuple(explained)


def _compare(plan: Plan, plans: Sequence[Plan], place: int, min_replicas: int) -> str:
    asked = f" with {min_replicas} replicas or more" if min_replicas > 1 else ""
    if len(plans) == 1:
        return f"{plan.shape}: the only axes that fit{asked}."
    if place == 0:
        other = plans[1]
        return (
            f"{plan.shape}: the fastest of all plans{asked}; next best is {other.shape}, "
            f"{other.step_time_s / plan.step_time_s - 1:.1%} slower."
        )
    return f"{plan.shape}: {plan.step_time_s / plans[0].step_time_s - 1:.1%} slower than {plans[0].shape}."


def _limits(plan: Plan) -> str:
    terms = sorted(plan.step_breakdown.by_term().items(), key=lambda term: -term[1])
    named = [
        f"{name} {time / plan.step_time_s:.0%}" for name, time in terms if time > _SHOWN * plan.step_time_s
    ]
    return f"Its time is {', '.join(named)}; memory {plan.memory.total / plan.usable_bytes:.0%} full."


def _spares(plan: Plan) -> str:
    if not plan.devices_spare:
        return ""
    which = ", ".join(map(str, plan.spares[:3])) + (", ..." if len(plan.spares) > 3 else "")
    return f"{plan.devices_spare} of {plan.device_count} devices are left out as spares: {which}."


def _speeds(plan: Plan) -> str:
    if (
        len({quota for replica_class in plan.replica_classes for _, quota in replica_class.quotas}) <= 1
        and len(plan.replica_classes) == 1
    ):
        return ""
    quotas = ", ".join(
        f"{replicas} replica{'s'[: replicas != 1]} with {quota}"
        for replica_class in plan.replica_classes
        for replicas, quota in replica_class.quotas
    )
    return f"Microbatches: {quotas}."


def _uneven(plan: Plan) -> str:
    if len(plan.replica_classes) > 1:  # the quotas differ as the speeds do
        return ""
    part = plan.devices_used / plan.device_count * plan.microbatches / (plan.replicas * max(plan.quotas))
    # Each replica has the same number of microbatches if the batch is a multiple of all devices; the next smaller one.
    even = plan.global_batch // plan.device_count * plan.device_count
    if part >= _EVEN or not even or even == plan.global_batch:
        return ""
    return (
        f"A batch of {plan.global_batch} does not divide evenly over {plan.device_count} devices, which compute for "
        f"{part:.0%} of that time; a batch of {even} does."
    )
