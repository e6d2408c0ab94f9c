"""What a package loads, in a process of its own."""

import subprocess
import sys

import pytest

from tests.support.layers import (
    FILES,
    JAX_AND_KIN,
    NUMERICAL,
    PLANNING_COMMAND,
    STARRED,
    WITH_NUMPY,
    package_of,
)
from tests.support.patience import patience

PLAIN_PACKAGES = sorted({package_of(file.module) for file in FILES} - STARRED)


@pytest.mark.parametrize("package", PLAIN_PACKAGES)
def test_a_package_without_a_star_loads_neither_jax_nor_but_for_the_planner_numpy(package):
    modules = [
        file.module
        for file in FILES
        if package_of(file.module) == package and not file.module.startswith(PLANNING_COMMAND)
    ]
    refused = JAX_AND_KIN if package in WITH_NUMPY else NUMERICAL
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(*sorted({set(refused)!r} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(6), check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [], f"importing {modules} loads these"


def test_importing_the_root_loads_no_name_before_it_is_used():
    program = (
        "import sys, resilient_jax\n"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] in ('jax', 'numpy', 'resilient_jax')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(6), check=True
    )
    assert result.stdout.split() == ["resilient_jax", "resilient_jax.lazy_names"]
