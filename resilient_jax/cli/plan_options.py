"""The options of `resilient-jax plan`, and the parsers of their values."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration, load_calibration
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss
from resilient_jax.topology import Topology

CheckOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Only validate a topology file, and show what it describes."),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Topology file of the cluster, such as meshes/h100_32x8.toml."),
]
ModelOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File of the model, such as configs/llama3_70b.toml.")
]
BatchOption = Annotated[int | None, typer.Option(help="Sequences in a step, however many hosts are live.")]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST[/DEVICE]",
        help="A host that died, or a device that did, such as host-07/3; repeat for several.",
    ),
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST=SPEED",
        help="A host, device or link at a fraction of its speed: host-11=0.6, host-11/2=0.6, host-11/link=0.5; "
        "repeat for several.",
    ),
]
AxisOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="AXIS=SIZE", help="Plan only with this size of an axis, such as tensor=8; repeat for several."
    ),
]
MinReplicasOption = Annotated[
    int,
    typer.Option(
        metavar="R",
        help="Least number of replicas; with 2 or more, a job shrinks in place when one is lost.",
    ),
]
TopOption = Annotated[int, typer.Option(help="How many plans to show, the fastest first.")]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Constants of the estimate. Default: those beside the topology, if any."
    ),
]
DecideOption = Annotated[
    bool,
    typer.Option(
        "--decide",
        help="Show what a job's leader would do after each possible loss (a device, a host, two hosts, a failure "
        "domain): shrink, keep_axes, keep_stages, replace, reform, restore, wait, join, stop; and about a host or a "
        "device at 0.8, 0.5 and 0.25 of its speed: keep, replace, take_out, fewer_devices, redivide.",
    ),
]
SpareOption = Annotated[
    bool,
    typer.Option(
        "--spare",
        help="With --decide: the job has a spare host, which may take the place of a slow or a lost one.",
    ),
]
AfterLossOption = Annotated[
    DevicesAfterLoss,
    typer.Option(
        help="With --decide: what a host does with the devices that are left without a slow or lost one, as the key of "
        "this name in the configuration of a job: even (as many as divide the host's number), all, or host (nothing)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def choose_calibration(path: Path | None, topology: Path) -> Calibration:
    """Return the calibration in a file; without a path that beside the topology, if any, else the defaults.

    Raises:
        ConfigError: the file is not a valid calibration.
    """
    beside = topology.with_suffix(".calibration.toml")
    if path is None:
        return load_calibration(beside) if beside.is_file() else Calibration()
    return load_calibration(path)


def change_topology(topology: Topology, lost: Iterable[str], slow: Iterable[str]) -> Topology:
    """Return the topology without what was lost, and with what is slow at its speed: hosts, devices or links of hosts.

    Raises:
        CallerError: a string is not HOST=SPEED, or the topology lacks a host.
    """
    known: set[str] = set()
    for text in slow:
        name, found, speed = text.partition("=")
        if not found:
            raise CallerError(f"--slow: found {text!r}, expected HOST=SPEED, such as host-11=0.6")
        _refuse_twice("--slow", name, known)
        topology = topology.slowed(name, _number(speed, "--slow", text))
    return topology.without(*lost)


def _number(text: str, option: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise CallerError(f"{option}: found {whole!r}, expected a number after the '='") from error


def _refuse_twice(option: str, name: str, known: set[str]) -> None:
    if name in known:
        raise CallerError(f"{option}: found {name!r} twice, expected it once. Leave one of them out")
    known.add(name)


def parse_axes(texts: Iterable[str]) -> dict[Axis, int]:
    """Return the sizes of the given axes.

    Raises:
        CallerError: a string is not AXIS=SIZE, or names an axis twice.
    """
    known: set[str] = set()
    axes: dict[Axis, int] = {}
    for text in texts:
        name, _, size = text.partition("=")
        if name not in list(Axis) or not (size.isascii() and size.isdecimal()):
            raise CallerError(
                f"--axis: found {text!r}, expected AXIS=SIZE with an axis of {', '.join(Axis)}, such as tensor=8"
            )
        _refuse_twice("--axis", name, known)
        axes[Axis(name)] = int(size)
    return axes
