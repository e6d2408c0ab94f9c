"""`resilient-jax plan`: what can be said about a job before it runs."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resilient_jax.cli.plan_json import print_plans_as_json
from resilient_jax.cli.plan_table import print_plans
from resilient_jax.cli.topology_table import print_topology
from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration, load_calibration
from resilient_jax.planning.candidates import Fixed
from resilient_jax.planning.model_file import load_model_shape
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replanning import Replan, replan
from resilient_jax.planning.search import search_best
from resilient_jax.planning.transformer_profile import profile_transformer
from resilient_jax.topology import Topology, load_topology

WIDTH_IN_A_FILE = 160
"""Of what is printed where no terminal says how wide it is."""


def plan(
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Validate a topology file and show what it describes."),
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster, such as meshes/h100_32x8.toml.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model, such as configs/llama3_70b.toml.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences in a step, whoever lives.")] = None,
    lose: Annotated[list[str] | None, typer.Option(metavar="HOST", help="A host that died; repeat.")] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST=SPEED", help="A host at a part of its speed, such as host-11=0.6; repeat."
        ),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=SIZE", help="An axis that is given, such as tensor=8; repeat."),
    ] = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 3,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Constants of the estimate. Default: those beside the topology, if any."
        ),
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Search the fastest way to train a model on a cluster, and what to do when hosts die or slow down.

    Needs no accelerator and no cluster. Shows the best plans with their time
    by term, memory of a device, tokens per second and why; with --lose or
    --slow also what moves from the plan before.

    Example:

    resilient-jax plan --topology meshes/h100_32x8.toml --model configs/llama3_70b.toml --global-batch 1024
    --lose host-07 --slow host-11=0.6

    Or only validate a file (meshes/README.md says what it may contain):

    resilient-jax plan --check meshes/mine.toml
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH_IN_A_FILE)
    if check is not None:
        print_topology(console, load_topology(check))
        return
    if topology is None or model is None or global_batch is None:
        raise CallerError(
            "plan: found nothing to do, expected --topology, --model and --global-batch, or --check FILE, such as "
            "--topology meshes/h100_32x8.toml --model configs/llama3_70b.toml --global-batch 1024"
        )
    full = load_topology(topology)
    now = _change(full, lose or [], slow or [])
    shape = load_model_shape(model)
    constants = _constants(calibration, topology)
    fixed = Fixed(dict(_parse_axis(text) for text in fix or []))

    def find(where: Topology, number: int) -> tuple[Plan, ...]:
        profile = profile_transformer(shape.transformer, name=shape.name)
        return search_best(
            profile, where, global_batch=global_batch, calibration=constants, fixed=fixed, top=number
        )

    started = time.monotonic()
    plans = find(now, top)
    search_s = time.monotonic() - started
    change = _react(find(full, 1)[0], now, fixed) if now != full else None
    if json_only:
        print_plans_as_json(plans, change, search_s)
    else:
        print_plans(console, plans, change, search_s)


def _react(before: Plan, now: Topology, fixed: Fixed) -> Replan | None:
    """What to do; nothing is said where axes are given: then there is no choice."""
    return None if fixed.axes else replan(before, now)


def _constants(path: Path | None, topology: Path) -> Calibration:
    beside = topology.with_suffix(".calibration.toml")
    if path is None:
        return load_calibration(beside) if beside.is_file() else Calibration()
    return load_calibration(path)


def _change(topology: Topology, lost: list[str], slow: list[str]) -> Topology:
    for text in slow:
        name, found, speed = text.partition("=")
        if not found:
            raise CallerError(f"--slow: found {text!r}, expected HOST=SPEED, such as host-11=0.6")
        topology = topology.slowed(name, _number(speed, "--slow", text))
    return topology.without(*lost)


def _number(text: str, option: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise CallerError(f"{option}: found {whole!r}, expected a number after the '='") from error


def _parse_axis(text: str) -> tuple[Axis, int]:
    name, _, size = text.partition("=")
    if name not in list(Axis) or not size.isdecimal():
        raise CallerError(f"--fix: found {text!r}, expected AXIS=SIZE with an axis of {', '.join(Axis)}")
    return Axis(name), int(size)
