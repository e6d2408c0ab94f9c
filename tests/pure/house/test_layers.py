"""The layers of the design, as data, and the rules that every source file keeps.

- An import points down: to a strictly lower layer, or into its own package.
- Only the starred packages import JAX and its kin, anywhere in a file.
- Importing `resilient_jax` or a package without a star loads neither JAX nor, but for the planner, numpy.
- A machine imports no clock, thread, socket or randomness.
- No import stands inside a function, except where an `__init__` loads its names lazily.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import resilient_jax
from tests.support.patience import patience

ROOT = Path(resilient_jax.__file__).parent
ROOT_NAME = "resilient_jax"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "ids", "clock", "events", "threads"}),
    frozenset({"argument_checks", "config", "topology", "erasure", "protocol", "pipeline_schedule"}),
    frozenset({"telemetry", "transport", "erasure.kernels"}),
    frozenset({"store", "planning", "health"}),
    frozenset({"snapshot"}),
    frozenset({"membership", "data", "jax_runtime"}),
    frozenset({"cluster"}),
    frozenset({"sharding"}),
    frozenset({"program_analysis"}),
    frozenset({"compile"}),
    frozenset({"blocks"}),
    frozenset({"state"}),
    frozenset({"step"}),
    frozenset({"checkpoint", "pipeline"}),
    frozenset({"worker", "doctor.experiment_process"}),
    frozenset({"trainer"}),
    frozenset({"chaos", "doctor"}),
    frozenset({"cli", "testing"}),
    frozenset({ROOT_NAME}),  # the root's `__init__` names what is public; nothing below may import it
)
"""From the lowest to the highest, by dotted names under the root; the longest name that a module begins with counts."""
STARRED = frozenset(
    {
        "erasure.kernels",
        "data",
        "jax_runtime",
        "sharding",
        "program_analysis",
        "compile",
        "blocks",
        "state",
        "step",
        "checkpoint",
        "pipeline",
        "worker",
        "trainer",
        "doctor.experiment_process",
    }
)
JAX_AND_KIN = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore"})
NUMERICAL = JAX_AND_KIN | {"numpy"}
WITH_NUMPY = frozenset({"planning"})
"""Packages without a star that load numpy; no agent imports them, and of the commands only `PLANNING_COMMAND`."""
PLANNING_COMMAND = "resilient_jax.cli.plan"
"""How the modules of the command begin that loads the planner."""

LATE_LOADERS = frozenset(
    {
        "resilient_jax.cli.main",
        "resilient_jax.cluster.nvml_reader",
        "resilient_jax.worker.fork_server",
        "resilient_jax.worker.imported_modules",
    }
)
"""Modules that load others by a name that is not written there: the commands, each when it is asked for; in a standby
what the worker has loaded, in the fork server what the script imports; the binding of NVML where there are GPUs."""

MACHINES = frozenset(
    {
        "resilient_jax.membership.rules",
        "resilient_jax.membership.machine",
        "resilient_jax.membership.facts",
        "resilient_jax.membership.hangs",
        "resilient_jax.membership.job_history",
        "resilient_jax.membership.planned_change",
        "resilient_jax.membership.recovery_decision",
        "resilient_jax.membership.recovery_policy",
        "resilient_jax.membership.severities",
        "resilient_jax.membership.slowness",
        "resilient_jax.membership.tally",
        "resilient_jax.membership.world_formation",
        "resilient_jax.cluster.generation_orders",
        "resilient_jax.worker.worker_protocol",
        "resilient_jax.health.gpu_exclusion",
        "resilient_jax.health.gpu_health",
        "resilient_jax.health.gpu_monitor",
        "resilient_jax.health.monitor",
        "resilient_jax.health.work_series",
        "resilient_jax.health.change_points",
        "resilient_jax.health.duration_model",
        "resilient_jax.health.step_prediction",
    }
)
PURE_LIBRARIES = frozenset(
    {"bisect", "collections", "dataclasses", "enum", "itertools", "math", "msgspec", "statistics", "typing"}
)

PACKAGES = frozenset(room.split(".")[0] for rooms in LAYERS for room in rooms)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}


class Import(NamedTuple):
    """One imported module, by its absolute name, and where it stands."""

    module: str
    line: int
    in_function: bool


def package_of(module: str) -> str:
    """Return the room of one of our modules: the longest dotted name with a layer; else its package, or the root."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in LAYER_OF), parts[0] if parts else ROOT_NAME)


def find_imports(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """Yield every import of a file: absolute, relative, for type checkers only, by a literal name."""
    base = module.split(".") if is_package else module.split(".")[:-1]
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while pending:
        node, in_function = pending.pop()
        yield from (
            Import(name, getattr(node, "lineno", 0), in_function) for name in _names_imported(node, base)
        )
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def _names_imported(node: ast.AST, base: list[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            stem = base[: len(base) - level + 1] if level else []
            origin = ".".join([*stem, *([module] if module else [])])
            if origin == ROOT_NAME:  # `from resilient_jax import config` means the package, not the root
                yield from (f"{origin}.{a.name}" if a.name in PACKAGES else origin for a in names)
            else:
                yield origin
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value


class SourceFile(NamedTuple):
    """A Python file of ours."""

    path: Path
    module: str

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def imports(self) -> Iterator[Import]:
        return find_imports(self.path.read_text("utf-8"), self.module, is_package=self.is_package)


def find_source_files() -> list[SourceFile]:
    """Every Python file of the package, with its module name."""
    files = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        files.append(SourceFile(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return files


FILES = find_source_files()
PLAIN_PACKAGES = sorted({package_of(file.module) for file in FILES} - STARRED)

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.module)


@each_file
def test_a_file_belongs_to_a_layer(file):
    package = package_of(file.module)
    assert package in LAYER_OF, (
        f"{file.path}: give the package {package!r} its layer, in LAYERS and design.md"
    )


def find_upward_imports(imports: Iterator[Import], module: str) -> list[str]:
    """Return which imports do not point down."""
    package = package_of(module)
    return [
        f"line {item.line}: {package} (layer {LAYER_OF[package]}) imports {item.module} "
        f"(layer {LAYER_OF.get(package_of(item.module))})"
        for item in imports
        if item.module.split(".")[0] == ROOT_NAME
        and package_of(item.module) != package
        and LAYER_OF.get(package_of(item.module), len(LAYERS)) >= LAYER_OF[package]
    ]


@each_file
def test_imports_point_down_only(file):
    assert find_upward_imports(file.imports(), file.module) == []


@each_file
def test_only_starred_packages_import_jax(file):
    if package_of(file.module) in STARRED:
        return
    found = [item for item in file.imports() if item.module.split(".")[0] in JAX_AND_KIN]
    assert found == [], f"{file.path}: only {sorted(STARRED)} may import {sorted(JAX_AND_KIN)}"


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_a_machine_imports_no_clock_thread_socket_or_randomness(machine):
    (file,) = (file for file in FILES if file.module == machine)
    libraries = {name for item in file.imports() if (name := item.module.split(".")[0]) != ROOT_NAME}
    assert libraries <= PURE_LIBRARIES


@each_file
def test_no_import_stands_inside_a_function(file):
    if file.is_package:  # a lazily loading __init__ may
        return
    assert [item for item in file.imports() if item.in_function] == []


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


@each_file
def test_only_those_known_for_it_load_modules_late(file):
    if file.is_package:  # a lazily loading __init__ may
        return
    calls = [
        node
        for node in ast.walk(ast.parse(file.path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "import_module"
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]
    assert not calls or file.module in LATE_LOADERS


VIOLATIONS = {
    "from a higher layer": ("resilient_jax.store.memory", "from resilient_jax.cluster import agent"),
    "from another package of its layer": ("resilient_jax.data.rows", "import resilient_jax.cluster.agent"),
    "relative": ("resilient_jax.store.memory", "from ..cluster.agent import run"),
    "relative, naming the package": ("resilient_jax.store.memory", "from .. import cluster"),
    "the root": ("resilient_jax.cli.main", "import resilient_jax as rj"),
    "for type checkers only": (
        "resilient_jax.store.memory",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from resilient_jax import cluster",
    ),
    "at run time": ("resilient_jax.store.memory", "importlib.import_module('resilient_jax.cluster')"),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_an_import_that_points_up_is_found(case):
    module, source = VIOLATIONS[case]
    assert len(find_upward_imports(find_imports(source, module, is_package=False), module)) == 1


def test_the_longest_dotted_name_gives_a_module_its_layer():
    assert package_of("resilient_jax.erasure.kernels.numpy_kernel") == "erasure.kernels"
    assert package_of("resilient_jax.erasure.matrix") == "erasure"
    source = "from resilient_jax.erasure.kernels import choose_kernel\n"
    imports = list(find_imports(source, "resilient_jax.erasure.matrix", is_package=False))
    assert len(find_upward_imports(iter(imports), "resilient_jax.erasure.matrix")) == 1
    assert find_upward_imports(iter(imports), "resilient_jax.snapshot.server") == []


def test_an_import_that_points_down_or_stays_is_allowed():
    source = (
        "import msgspec\nfrom resilient_jax import errors\nfrom . import memory\n"
        "from ..transport.server import serve\nfrom resilient_jax.store.memory import Memory\n"
    )
    module = "resilient_jax.store.etcd"
    assert find_upward_imports(find_imports(source, module, is_package=False), module) == []


def test_an_import_inside_a_function_is_found():
    source = "import os\ndef f():\n    class A:\n        import sys\n"
    found = {
        item.module: item.in_function for item in find_imports(source, "resilient_jax.ids", is_package=False)
    }
    assert found == {"os": False, "sys": True}
