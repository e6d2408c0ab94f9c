"""What a script has imported, described by its worker, and imported again by a zygote.

Only installed modules: what the user is writing may start threads, open files or look at the arguments, and runs when
the script runs. This file imports no jax: the script may set variables before it does.
"""

import importlib
import os
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from resilient_jax.protocol.worker_messages import ImportsReported


def describe_imports() -> ImportsReported:
    """Return which installed modules this process has imported, and in which surroundings."""
    folder = find_script_folder(vars(sys.modules["__main__"]).get("__file__"))
    installed = tuple(f"{path}{os.sep}" for path in list_installed_folders())
    modules = {}
    for name, module in list(sys.modules.items()):
        file = find_file(name, module)
        if file is not None and file.startswith(installed):
            modules[name] = file
    return ImportsReported(
        modules=modules,
        search_path=tuple(path for path in sys.path if os.path.realpath(path) != folder),
        environment=dict(os.environb),
    )


def import_again(imports: ImportsReported) -> int:
    """Import what a worker has imported; return how many modules could not be, which the script then tries itself."""
    failed: set[str] = set()
    num_failed = 0
    for name in imports.modules:
        if name in sys.modules:
            continue
        packages = _list_packages(name)
        if failed.isdisjoint(packages):  # once only: a package that fails has run in part
            try:
                importlib.import_module(name)
                continue
            except (
                Exception,
                SystemExit,
            ):  # whatever a module does at its import, as long as the process lives
                failed.add(next((package for package in packages if package not in sys.modules), name))
        num_failed += 1
    return num_failed


def _list_packages(name: str) -> list[str]:
    """Return the names of the packages that a module is in, from the outermost."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def find_foreign_module(imports: ImportsReported) -> str:
    """Return why this process's modules are not the worker's, and so not the script's either; empty: they are."""
    for name, module in list(sys.modules.items()):
        file, expected = find_file(name, module), imports.modules.get(name)
        if file is not None and expected is not None and expected != file:
            return f"module {name}: found {file}, expected that of the worker, {expected}"
    return ""


def find_changed_module(since_ns: int) -> str:
    """Return the file of an imported module that was written after this wall time; empty if there is none."""
    files = [file for name, module in list(sys.modules.items()) if (file := find_file(name, module))]
    for file in files:
        try:
            # Not the time of modification, which installers set to that of the package.
            if os.stat(file).st_ctime_ns > since_ns:
                return file
        except OSError:  # made for the import and removed, or in an archive
            continue
    return ""


def find_script_folder(script: object) -> str:
    """Return the folder that Python puts first on the search path for this script."""
    return os.path.dirname(os.path.realpath(script)) if isinstance(script, str) else os.getcwd()


def find_file(name: str, module: ModuleType | None) -> str | None:
    """Return the file that a module was loaded from under its own name; None if there is none."""
    # From the dict: some modules answer to any attribute, or import others when they are asked for one.
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
    if getattr(spec, "name", None) != name or not getattr(spec, "has_location", False):
        return None
    origin = getattr(spec, "origin", None)
    return origin if isinstance(origin, str) else None


def is_below(file: str, folder: str) -> bool:
    """Return whether a file is in a folder, at any depth."""
    return file.startswith(os.path.join(folder, ""))


def list_installed_folders() -> set[Path]:
    """Return the folders of Python's library, of installed packages, and of this one."""
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names |= {*site.getsitepackages(), site.getusersitepackages()}
    return {Path(name).resolve() for name in names if name} | {Path(__file__).resolve().parents[1]}
