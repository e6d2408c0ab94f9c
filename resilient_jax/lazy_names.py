"""Names of a package that load the module that defines them when they are first used."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def make_lazy_names(
    package: str, homes: Mapping[str, str], packages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are loaded at their first use.

    A home is a string, not an import: so a package may offer names of higher layers, and its own import stays cheap.

    Args:
        package: `__name__` of the package.
        homes: the name of the module that defines it, of each public name.
        packages: public packages inside of the package.
    """
    names = sorted([*homes, *packages])

    def load_name(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        return getattr(importlib.import_module(homes[name]), name)

    def list_names() -> list[str]:
        return names

    return load_name, list_names, names
