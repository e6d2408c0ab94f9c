"""What a job would do about changes of its cluster, as tables, sentences and JSON."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.cli.topology_table import format_si
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.possible_changes import (
    PossibleChange,
    list_possible_losses,
    list_possible_slowness,
)
from resilient_jax.planning.replan_decision import ReplanDecision, ReplanStep
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.policy.score import describe_s
from resilient_jax.protocol.recovery_records import RecoveryAction
from resilient_jax.topology import Topology

TITLES: Final = {
    "losses": "after each possible loss",
    "slow": "a host or a device slow: the speed after each action",
}


class DecidedChange(NamedTuple):
    """A possible change with the decision about it; None: the job stops, because no plan fits (`why_stop`)."""

    change: PossibleChange
    decision: ReplanDecision | None
    why_stop: str = ""

    @property
    def steps(self) -> tuple[ReplanStep, ...]:
        """The decisions, in order; none where the job stops."""
        return self.decision.steps if self.decision is not None else ()


def decide_changes(
    topology: Topology, decide: Callable[[Topology], ReplanDecision]
) -> dict[str, list[DecidedChange]]:
    """Return what a job would do about each possible change of the topology on which it runs, by kind."""
    return {
        "losses": [_decide_change(one, topology, decide) for one in list_possible_losses(topology)],
        "slow": [_decide_change(one, topology, decide) for one in list_possible_slowness(topology)],
    }


def _decide_change(
    change: PossibleChange, topology: Topology, decide: Callable[[Topology], ReplanDecision]
) -> DecidedChange:
    try:
        return DecidedChange(change, decide(change.apply(topology)))
    except PlanError as error:
        return DecidedChange(change, None, str(error))


def print_decided_changes(console: Console, decided: Mapping[str, Sequence[DecidedChange]]) -> None:
    """Print what would be done about each possible change: a row for each option, and the reason of each choice."""
    for key, changes in decided.items():
        _print_changes(console, TITLES[key], changes)


def _print_changes(console: Console, title: str, decided: Sequence[DecidedChange]) -> None:
    table = _make_table(f"{title}, the choice first")
    for one in decided:
        what = f"{one.change.describe()} (1 of {one.change.num_alike})"
        if not one.steps:
            table.add_row(escape(what), "stop", "-", "-", "0", "-", "0", "-")
        for place, step in enumerate(one.steps):
            _add_rows(table, step.when if place else what, step)
    console.print(table)
    for one in decided:
        what = one.change.describe()
        if not one.steps:
            console.print(f"{escape(what)}: the job stops: {escape(one.why_stop)}")
        for place, step in enumerate(one.steps):
            about = f"{what}, {step.when}" if place else what
            console.print(f"{escape(about)}: {escape(step.reason)}")


def print_replan(console: Console, decision: ReplanDecision) -> None:
    """Print what a job would do about the change that was given."""
    times = {describe_s(step.choice.next_failure_s) for step in decision.steps[:1]}
    table = _make_table(
        f"after the change, {''.join(times) or '-'} before the next failure, the choice first"
    )
    table.add_row("before", "", decision.before.shape, f"{decision.before.step_time_s:.4g} s", "1")
    for step in decision.steps:
        _add_rows(table, step.when, step)
    console.print(table)
    console.print(f"what to do: {escape(decision.reason)}")


def _make_table(title: str) -> Table:
    table = Table("", "", "plan", title=title)
    for name in ("step", "speed", "pause", "score", "bytes moved"):
        table.add_column(name, justify="right")
    return table


def _add_rows(table: Table, about: str, step: ReplanStep) -> None:
    for place, option in enumerate(option for option in step.choice.options if not option.why_not):
        found = step.plans[option.action]
        table.add_row(
            escape(about) if place == 0 else "",
            str(option.action),
            found.plan.shape,
            f"{found.step_time_s:.4g} s",
            f"{step.compute_speed(option):.3f}",
            f"{option.pause_s:.3g} s",
            f"{option.score:.6f}",
            format_si(found.migration.bytes_moved, "B"),
        )


def describe_decided_change(one: DecidedChange) -> dict[str, object]:
    """Return a decision in types that JSON has."""
    return {**dataclasses.asdict(one.change), "why_stop": one.why_stop, "steps": describe_steps(one.steps)}


def describe_steps(steps: Iterable[ReplanStep]) -> list[dict[str, object]]:
    """Return decisions in types that JSON has: of each the choice is the first option."""
    return [
        {
            "when": step.when,
            "reason": step.reason,
            "next_failure_s": step.choice.next_failure_s,
            "bytes_lost": step.bytes_lost,
            "options": [
                {
                    "action": option.action,
                    "speed": step.compute_speed(option),
                    "pause_s": option.pause_s,
                    "score": option.score,
                    "why_not": option.why_not,
                    "plan": _describe_plan(step, option.action),
                }
                for option in step.choice.options
            ],
        }
        for step in steps
    ]


def _describe_plan(step: ReplanStep, action: RecoveryAction) -> dict[str, object] | None:
    """Return the plan that runs after an action; None: the action is not possible."""
    found = step.plans.get(action)
    if found is None:
        return None
    teams = found.plan.teams if isinstance(found.plan, UnequalPlan) else ()
    return {
        "shape": found.plan.shape,
        "teams": [
            {
                "shape": team.plan.shape,
                "hosts": [dataclasses.asdict(span) for span in team.plan.hosts],
                "microbatches": team.microbatches,
                "sequences": team.sequences,
            }
            for team in teams
        ],
        "step_time_s": found.step_time_s,
        "compile_s": found.compile_s,
        "migration_s": found.migration_s,
        "bytes_moved": found.migration.bytes_moved,
        "moves": [dataclasses.asdict(move) for move in found.migration.transfers],
    }
