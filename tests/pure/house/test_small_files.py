"""A file of a few lines that one other file imports is a part of that file."""

import collections

from tests.pure.house.callers import PACKAGE, read_module
from tests.pure.house.package_trees import TEXTS, TREES

MAX_SMALL_LINES = 40
INSTRUMENTS = ("chaos/", "local_job/", "testing/")
ALLOWED = {
    "cli/ending_signals.py": "campaigns (`tests/chaos`) end by it, too",
    "cluster/status_changes.py": "pure: the simulated cluster runs it, which may not load the agent's processes",
    "membership/protection.py": "membership/rules.py would have more than 500 lines",
}
"""Small files with one importer, each with its reason."""


def list_small_files() -> set[str]:
    """Return the files of at most `MAX_SMALL_LINES` lines with one importer, by their path in the package.

    What a package's `__init__` exports may have several users.
    """
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for path, tree in TREES.items():
        name = f"{PACKAGE}.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        module = read_module(name, tree, is_package=path.endswith("__init__.py"))
        for source, key in module.imported.values():
            importers[source].add(path)
            importers[f"{source}.{key}"].add(path)
    found = set()
    for path, text in TEXTS.items():
        name = f"{PACKAGE}.{path.removesuffix('.py').replace('/', '.')}"
        is_judged = not path.startswith(INSTRUMENTS) and not path.endswith("__init__.py")
        if is_judged and len(text.splitlines()) <= MAX_SMALL_LINES:
            users = importers[name]
            if len(users) == 1 and users != {f"{path.rpartition('/')[0]}/__init__.py"}:
                found.add(path)
    return found


def test_a_small_file_has_several_importers() -> None:
    """Otherwise: merge it into its importer. An entry that is not needed any more must go."""
    assert list_small_files() == set(ALLOWED)
