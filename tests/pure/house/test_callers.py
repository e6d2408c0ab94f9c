"""What only tests use is not in the package: it is used by a job, wired into one, or deleted.

A mechanism that no job runs costs its readers as much as one that a job runs. A paper's rule that only tests run is not
there.
"""

import ast
import importlib

from resilient_jax.lazy_names import read_homes
from tests.pure.house.callers import PACKAGE, Callers
from tests.pure.house.package_trees import TREES
from tests.support.paths import ROOT

INSTRUMENTS = ("chaos", "local_job", "testing")
"""What runs, breaks and examines jobs from outside, for tests, campaigns and the demonstration."""
ALLOWED = {
    "store/interface.py Store.delete": "the store has etcd's meaning; its conformance suite deletes",
}
"""Definitions without a caller, each with its reason."""


def list_without_callers(trees: dict[str, ast.Module]) -> list[str]:
    """Return what neither a command, a public name nor an example reaches."""
    callers = Callers(trees, INSTRUMENTS)
    for package in (PACKAGE, f"{PACKAGE}.data", f"{PACKAGE}.planning"):
        importlib.import_module(package)
        homes = read_homes(package)
        callers.reach_public({name: home for name, home in homes.items() if home != package})
    callers.reach([(f"{PACKAGE}.cli.main", "main")])
    for path in (ROOT / "examples").rglob("*.py"):
        callers.reach_from_script(ast.parse(path.read_text("utf-8")))
    return list(callers.list_unreached())


def test_everything_in_the_package_is_used_by_more_than_tests() -> None:
    """Otherwise: wire it into a job, or delete it with its tests. What tests need stands beside them."""
    assert set(list_without_callers(TREES)) == set(ALLOWED)


def test_what_only_the_dead_use_is_found() -> None:
    room = """
import atexit
import threading
FIRST = 1
SECOND = 2
def used(): return FIRST
def unused(): return SECOND
def also_unused(): unused()
@atexit.register
def at_exit(): pass
class Used:
    def __init__(self): self.called()
    def called(self): pass
    def never_called(self): pass
class Run(threading.Thread):
    def run(self): pass
print(Used(), Run(), used())
"""
    found = list_without_callers({**TREES, "health/new_room.py": ast.parse(room)})
    own = {name.partition(" ")[2] for name in found if name.startswith("health/new_room.py")}
    assert own == {"SECOND", "unused", "also_unused", "Used.never_called"}
