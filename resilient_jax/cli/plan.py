"""`resilient-jax plan`: search plans for a job before it runs."""

import functools
import time
from pathlib import Path

from resilient_jax.cli.console import open_console
from resilient_jax.cli.plan_changes import decide_changes, print_decided_changes, print_replan
from resilient_jax.cli.plan_json import print_plans_as_json
from resilient_jax.cli.plan_options import (
    AfterLossOption,
    AxisOption,
    BatchOption,
    CalibrationOption,
    CheckOption,
    ClusterOption,
    DecideOption,
    JsonOption,
    MinReplicasOption,
    ModelOption,
    SlowOption,
    SpareOption,
    TopOption,
    WithoutOption,
    change_topology,
    choose_calibration,
    parse_axes,
)
from resilient_jax.cli.plan_table import print_plans
from resilient_jax.cli.topology_table import print_topology
from resilient_jax.errors import CallerError
from resilient_jax.planning.model_file import load_model_shape
from resilient_jax.planning.plan_request import PlanConstraints, make_request
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.replan_decision import ReplanDecision
from resilient_jax.planning.replanning import replan
from resilient_jax.planning.search import search_best
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.topology import load_topology

MAX_BATCH = 10**9
"""The most sequences of a step; a larger number is mistyped, and the search over its divisors would take hours."""


def plan(
    check: CheckOption = None,
    topology: ClusterOption = None,
    model: ModelOption = None,
    global_batch: BatchOption = None,
    without: WithoutOption = None,
    slow: SlowOption = None,
    axis: AxisOption = None,
    min_replicas: MinReplicasOption = 1,
    top: TopOption = 3,
    decide: DecideOption = False,
    spare: SpareOption = False,
    devices_after_loss: AfterLossOption = "even",
    calibration: CalibrationOption = None,
    json_only: JsonOption = False,
) -> None:
    """Search the fastest plan to train a model on a cluster, and the replan when hosts die or slow down.

    Needs no accelerator and no cluster. Shows the best plans with their time by term, the memory of a device, tokens
    per second and the reason; with --without or --slow also what the leader of a job would do about that change.

    Example: resilient-jax plan --topology meshes/h100_32x8.toml --model configs/llama3_70b.toml --global-batch 1024
    --without host-07 --slow host-11=0.6

    With --decide also what the leader of a job would do if a device, a host, two hosts or a failure domain were lost
    then, and about a host or a device at 0.8, 0.5 and 0.25 of its speed.

    Or only validate a topology file (see meshes/README.md): resilient-jax plan --check meshes/mine.toml
    """
    if check is not None:
        checked = load_topology(check)
        with open_console() as console:
            print_topology(console, checked)
        return
    if topology is None or model is None or global_batch is None:
        raise CallerError(
            "plan: found nothing to do, expected --topology, --model and --global-batch, or --check FILE, such as "
            "--topology meshes/h100_32x8.toml --model configs/llama3_70b.toml --global-batch 1024"
        )
    if global_batch > MAX_BATCH:
        raise CallerError(f"--global-batch: found {global_batch}, expected at most {MAX_BATCH}")
    if decide and axis:
        raise CallerError(
            "--decide: found --axis beside it, expected no axis that is given: after a loss other axes may be better. "
            "Leave out one of the two"
        )
    before = load_topology(topology)
    now = change_topology(before, without or (), slow or ())
    cost = _load_cost(model)
    constants = choose_calibration(calibration, topology)
    constraints = PlanConstraints(parse_axes(axis or ()), min_replicas=min_replicas)

    request = make_request(cost, now, global_batch=global_batch, calibration=constants)
    started = time.monotonic()
    plans = search_best(request, constraints, top)
    search_s = time.monotonic() - started

    decide_after = functools.partial(
        replan, min_replicas=min_replicas, has_spare=spare, devices_after_loss=devices_after_loss
    )
    # Axes that are given leave no choice.
    change: ReplanDecision | None = None
    if now != before and not constraints.axes:
        change = decide_after(search_best(request.on_topology(before), constraints)[0], now)
    decided = decide_changes(now, functools.partial(decide_after, plans[0])) if decide else {}
    with open_console() as console:
        if json_only:
            print_plans_as_json(plans, change, search_s, decided)
            return
        print_plans(console, plans, search_s)
        if change is not None:
            print_replan(console, change)
        print_decided_changes(console, decided)


def _load_cost(model: Path) -> ProgramCost:
    shape = load_model_shape(model)
    return analyze_transformer(shape.transformer, name=shape.name)
