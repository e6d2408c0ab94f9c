"""The command line of the benchmarks, and their independence: the installed package imports none of them."""

import ast
import subprocess

import pytest

from tests.benchmarks.paths import COMMAND, REPOSITORY
from tests.support.patience import patience

BENCHMARKS = (
    "stall",
    "step",
    "erasure",
    "snapshot",
    "plan",
    "resilience",
    "control",
    "hybrid",
    "mesh",
    "detect",
    "decide",
)


def test_every_benchmark_is_a_command() -> None:
    done = subprocess.run(
        [*COMMAND, "--help"], capture_output=True, text=True, timeout=patience(6), check=True
    )
    assert all(f" {name} " in done.stdout for name in BENCHMARKS)


def test_an_error_of_this_package_is_reported_in_one_line_and_by_the_exit_code() -> None:
    done = subprocess.run(
        [*COMMAND, "erasure", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=patience(6),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "resilient_jax").rglob("*.py")), ids=lambda path: path.stem
)
def test_the_installed_package_imports_no_benchmark(path) -> None:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    imported = [
        name
        for node in nodes
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert not [name for name in imported if name.split(".")[0] in ("benchmarks", "tests")]
