"""Which libraries a script imports, found in its text and not by running it. Imports no jax.

A process that is to be forked for a script imports them before the script runs. That is only right for libraries that
start no thread and open no file at their import, so only those of `FORKABLE_PACKAGES` count; and only if the script,
with the modules of its user's that it imports, sets no environment variable, since libraries read some at their import.
"""

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from resilient_jax.worker.imported_modules import find_script_folder, list_installed_folders

FORKABLE_PACKAGES: Final = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "resilient_jax"})
"""Tried: after their imports there is no thread but those of OpenBLAS, which handles a fork."""
ALWAYS_IMPORTED: Final = ("jax.numpy", "resilient_jax.worker.run")
"""What every worker imports, whatever its script names."""
ENVIRONMENT_METHODS: Final = frozenset({"setdefault", "update", "pop", "clear", "popitem"})
PATH_METHODS: Final = frozenset({"insert", "append", "extend", "remove", "pop", "clear"})
MAX_FILES: Final = 200
"""Of the script's own modules; a script with more is rare, and is only started more slowly."""


class ScriptImports(NamedTuple):
    """The libraries that a script imports.

    Attributes:
        modules: modules of `FORKABLE_PACKAGES`, in the order of the script's text.
        obstacle: why modules must not be imported before the script runs; empty: they may be.
    """

    modules: tuple[str, ...]
    obstacle: str = ""


def find_script_imports(script: str) -> ScriptImports:
    """Return what a script imports, itself or through modules of its user's."""
    python_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    search_path = [find_script_folder(script), *map(os.path.realpath, python_path)]
    installed = tuple(f"{path}{os.sep}" for path in list_installed_folders())
    modules: dict[str, None] = dict.fromkeys(ALWAYS_IMPORTED)
    files, seen = [Path(script)], {Path(script)}
    while files:
        file = files.pop(0)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            return ScriptImports((), f"{file}: {error}")
        if line := _find_environment_change(tree):
            return ScriptImports(
                (), f"{file}, line {line}: sets an environment variable, which libraries may read"
            )
        if line := _find_path_change(tree):
            return ScriptImports((), f"{file}, line {line}: changes the path on which modules are searched")
        early = dict.fromkeys(_list_imports(_walk_statements(tree.body), file))
        late = dict.fromkeys(_list_imports(ast.walk(tree), file))  # those in functions, too
        for name in early | late:
            own = [f for f in _find_files(name, search_path) if not str(f).startswith(installed)]
            if not own and name in early and name.partition(".")[0] in FORKABLE_PACKAGES:
                modules[name] = None
            files += [file for file in own if file not in seen]
            seen.update(own)
        if len(seen) > MAX_FILES:
            return ScriptImports((), f"{script}: imports more than {MAX_FILES} modules of its user's")
    return ScriptImports(tuple(modules))


def _list_imports(nodes: Iterable[ast.AST], file: Path) -> Iterator[str]:
    """Yield what these statements of a file import: dotted names, relative ones as paths without their ending."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = os.path.join(file.parents[node.level - 1], *base.split("."))
            separator = os.sep if node.level else "."
            yield base
            # A name may be a module, too; one that is none is not imported.
            yield from (f"{base}{separator}{alias.name}" for alias in node.names if alias.name != "*")


def _walk_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, field, [])
            for item in inner:
                yield from _walk_statements(item.body if isinstance(item, ast.ExceptHandler) else [item])


def _find_environment_change(tree: ast.Module) -> int:
    """Return the line that sets or removes an environment variable, or loads a file of them; 0: none does."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(
                value=ast.Attribute(attr="environ") | ast.Name(id="environ"), ctx=ast.Store() | ast.Del()
            ):
                return node.lineno
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv" | "load_dotenv")):
                return node.lineno
            case ast.Call(func=ast.Name(id="putenv" | "unsetenv" | "load_dotenv")):
                return node.lineno
            case ast.Call(
                func=ast.Attribute(attr=name, value=ast.Attribute(attr="environ") | ast.Name(id="environ"))
            ) if name in ENVIRONMENT_METHODS:
                return node.lineno
            case ast.Attribute(attr="environb") | ast.alias(name="environb"):
                return node.lineno
            case (
                ast.alias(name="environ", asname=str())
                | ast.Assign(value=ast.Attribute(attr="environ") | ast.Name(id="environ"))
            ):
                return node.lineno
            case ast.AugAssign(target=ast.Attribute(attr="environ") | ast.Name(id="environ")):
                return node.lineno
    return 0


def _find_path_change(tree: ast.Module) -> int:
    """Return the line that changes `sys.path`; 0: none does."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr=name, value=ast.Attribute(attr="path", value=ast.Name(id="sys")))
            ):
                if name in PATH_METHODS:
                    return node.lineno
            case ast.Attribute(attr="path", value=ast.Name(id="sys"), ctx=ast.Store()):
                return node.lineno
            case ast.Subscript(value=ast.Attribute(attr="path", value=ast.Name(id="sys")), ctx=ast.Store()):
                return node.lineno
    return 0


def _find_files(name: str, search_path: list[str]) -> list[Path]:
    """Return the files of a module in these folders, with those of its packages; empty: it is not there."""
    if os.path.isabs(name):
        return [file for file in (Path(name, "__init__.py"), Path(f"{name}.py")) if file.is_file()]
    found: list[Path] = []
    parts = name.split(".")
    for folder in search_path:
        for length in range(1, len(parts) + 1):
            stem = Path(folder, *parts[:length])
            for candidate in (stem / "__init__.py", stem.with_suffix(".py")):
                if candidate.is_file():
                    found.append(candidate)
                    break
        if found:
            break
    return found
