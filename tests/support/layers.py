"""The layers of the design, as data, and what the source files import; `test_layers` has the rules."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import resilient_jax

ROOT = Path(resilient_jax.__file__).parent

ROOT_NAME = "resilient_jax"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "ids", "clock", "events", "lazy_names", "notices", "threads"}),
    frozenset({"argument_checks", "config", "topology", "erasure", "protocol", "pipeline_schedule"}),
    frozenset({"telemetry", "transport", "erasure.kernels", "policy"}),
    frozenset({"store", "planning", "health", "host_exchange"}),
    frozenset({"snapshot"}),
    frozenset({"membership", "data", "jax_runtime"}),
    frozenset({"cluster"}),
    frozenset({"sharding", "weighted_mean"}),
    frozenset({"program_analysis"}),
    frozenset({"compile"}),
    frozenset({"blocks"}),
    frozenset({"state"}),
    frozenset({"step"}),
    frozenset({"checkpoint", "pipeline"}),
    frozenset({"worker", "doctor.experiment_process"}),
    frozenset({"trainer"}),
    frozenset({"local_job", "doctor"}),
    frozenset({"cli"}),
    frozenset({ROOT_NAME}),  # the root's `__init__` names what is public; nothing below may import it
)
"""From the lowest to the highest, by dotted names under the root; the longest name that a module begins with counts."""

STARRED = frozenset(
    {
        "erasure.kernels",
        "data",
        "host_exchange",
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
        "weighted_mean",
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
        "resilient_jax.lazy_names",
        "resilient_jax.worker.imported_modules",
        "resilient_jax.worker.zygote",
    }
)
"""Modules that load others by a name that is not written there: the commands, each when it is asked for; public names;
in a zygote what the worker has loaded, or the script imports; the binding of NVML where there are GPUs."""

MACHINES = frozenset(
    {
        "resilient_jax.membership.rules",
        "resilient_jax.membership.machine",
        "resilient_jax.membership.facts",
        "resilient_jax.membership.hangs",
        "resilient_jax.membership.job_history",
        "resilient_jax.membership.planned_change",
        "resilient_jax.membership.recovery_decision",
        "resilient_jax.policy.choice",
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
    {
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "graphlib",
        "itertools",
        "math",
        "msgspec",
        "statistics",
        "typing",
    }
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


def find_upward_imports(imports: Iterator[Import], module: str) -> list[str]:
    """Return which imports do not point down."""
    package = package_of(module)
    return [
        f"line {item.line}: {package} (layer {LAYER_OF[package]}) imports {item.module} "
        f"(layer {LAYER_OF.get(package_of(item.module))})"
        for item in imports
        if _points_up(item.module, package)
    ]


def _points_up(module: str, package: str) -> bool:
    root, imported = module.split(".")[0], package_of(module)
    if root != ROOT_NAME:
        return root == "tests"
    return imported != package and LAYER_OF.get(imported, len(LAYERS)) >= LAYER_OF[package]
