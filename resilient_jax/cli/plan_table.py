"""Prints plans as tables and a bar chart."""

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.cli.topology_table import format_si
from resilient_jax.planning.plan import Plan

BAR_CELLS = 50
"""The length of the chart's longest bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_plans(console: Console, plans: Sequence[Plan], search_s: float) -> None:
    """Print the best plans, and their time and memory by term."""
    best = plans[0]
    console.print(
        f"{escape(best.model_name)} on {escape(best.topology_name)}: {best.device_count} devices, "
        f"{best.global_batch} sequences in a step; searched in {1e3 * search_s:.0f} ms"
    )
    console.print(tabulate_plans(plans))
    console.print(tabulate_times(plans))
    console.print(tabulate_memory(plans))
    console.print("where the time of the best goes:")
    for line in draw_bars(best.step_breakdown.by_term()):
        console.print(line, highlight=False)
    console.print(f"why: {escape(best.reason)}")


def tabulate_plans(plans: Sequence[Plan]) -> Table:
    """Return a table with a row for each plan, fastest first."""
    table = Table("", "plan", title="plans")
    for name in ("microbatch", "remat", "quotas", "spare", "step", "tokens/s", "MFU", "memory"):
        table.add_column(name, justify="right")
    for place, plan in enumerate(plans, 1):
        quotas = sorted({quota for team in plan.replica_classes for _, quota in team.quotas})
        table.add_row(
            str(place),
            plan.shape,
            f"{plan.microbatch_sequences} ({plan.microbatch.sequences} each)",
            "yes" if plan.microbatch.remat else "no",
            f"{quotas[0]}" if len(quotas) == 1 else f"{quotas[0]} to {quotas[-1]}",
            str(plan.devices_spare),
            f"{plan.step_time_s:.4g} s",
            format_si(plan.tokens_per_s, "") if plan.tokens_per_s else "-",
            f"{plan.model_flops_utilization:.1%}",
            f"{format_si(plan.memory.total, 'B')} ({plan.memory.total / plan.usable_bytes:.0%})",
        )
    return table


def tabulate_times(plans: Sequence[Plan]) -> Table:
    """Return the table of the seconds of a step by term, without terms that are 0 in all plans."""
    terms = [plan.step_breakdown.by_term() for plan in plans]
    return _tabulate("seconds of a step by term", terms, lambda seconds: f"{seconds:.3g}")


def tabulate_memory(plans: Sequence[Plan]) -> Table:
    """Return the table of the fullest device's memory by term, without terms that are 0 in all plans."""
    terms = [
        {field.name: getattr(p.memory, field.name) for field in dataclasses.fields(p.memory)} for p in plans
    ]
    return _tabulate("memory of the fullest device by term", terms, lambda number: format_si(number, "B"))


def _tabulate(title: str, rows: Sequence[dict[str, float]], show) -> Table:  # noqa: ANN001 - of a number its text
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table("", title=title)
    for name in names:
        table.add_column(name, justify="right")
    for place, row in enumerate(rows, 1):
        table.add_row(str(place), *(show(row[name]) for name in names))
    return table


def draw_bars(terms: dict[str, float]) -> list[str]:
    """Return a bar for each term that is not 0; lengths are proportional to the terms.

    >>> draw_bars({"compute": 3.0, "bubble": 0.0, "fsdp": 1.0})[1]
    '     fsdp ████████████████▋ 25.0 %'
    """
    total, largest = sum(terms.values()), max(terms.values())
    return [
        f"{name:>9} {_bar(value / largest)} {100 * value / total:.1f} %"
        for name, value in terms.items()
        if value > 0
    ]


def _bar(part: float) -> str:
    eighths = round(part * BAR_CELLS * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
