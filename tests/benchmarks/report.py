"""Output of a benchmark: tables on a console, and one line of JSON."""

import os
import platform
import sys

import msgspec
from rich.console import Console

FILE_WIDTH = 120


def open_console(json_only: bool) -> Console:
    """Return the console for tables and progress; it prints nothing if only the line of JSON is wanted."""
    return Console(quiet=json_only, width=None if sys.stdout.isatty() else FILE_WIDTH)


def print_json_line(figures: msgspec.Struct) -> None:
    """Print the figures as one line of JSON on standard output."""
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


def describe_machine() -> str:
    """Return the machine and the Python that the figures were measured on."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
