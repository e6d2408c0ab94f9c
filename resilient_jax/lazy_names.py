"""Names of a package that load the module that defines them when they are first used."""

import ast
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def make_lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are loaded at their first use.

    Args:
        package: `__name__` of the package, which is being imported.
    """
    homes = read_homes(package)
    names = sorted(homes)

    def load_name(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    def list_names() -> list[str]:
        return names

    return load_name, list_names, names


def read_homes(package: str) -> dict[str, str]:
    """Return the module that defines it, of each public name of a package: the package itself of a package inside it.

    They are what the package imports for type checkers, as `from home import Name as Name`; a package that may import
    nothing from the rooms of its names has a stub with these imports beside its file.
    """
    path = str(sys.modules[package].__file__)
    with open(f"{path}i" if os.path.exists(f"{path}i") else path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname is not None
    }
