"""`resilient-jax plan`: what can be said about a job before it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resilient_jax.cli.topology_table import print_topology
from resilient_jax.errors import CallerError
from resilient_jax.topology import load_topology

WIDTH_IN_A_FILE = 160
"""Of what is printed where no terminal says how wide it is."""


def plan(
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Validate a topology file and show what it describes."),
    ] = None,
) -> None:
    """Validate a topology file (meshes/README.md says what it may contain) and show what it describes."""
    if check is None:
        raise CallerError(
            "plan: found nothing to do, expected --check FILE, such as --check meshes/h100_32x8.toml"
        )
    topology = load_topology(check)
    print_topology(Console(width=None if sys.stdout.isatty() else WIDTH_IN_A_FILE), topology)
