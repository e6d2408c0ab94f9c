"""Limits on the size of files, functions and classes, and one meaning for each public class name.

What is over a limit is listed in `TOLERATED`. The list only shrinks: an entry that is within the limits again must go.
"""

import ast
import collections
from collections.abc import Iterator

from tests.pure.house.package_trees import ROOT, TREES

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_METHODS = 500, 60, 20
MAX_README_LINES = 40
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

TOLERATED: frozenset[str] = frozenset()
"""What is over a limit, as `find_offenders` writes it."""


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and ast.get_docstring(function) is not None
    skipped = (first.end_lineno or first.lineno) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - skipped


def count_methods(definition: ast.ClassDef) -> int:
    """Return the number of functions that the body of a class defines."""
    return sum(isinstance(child, FUNCTION) for child in definition.body)


def find_offenders() -> Iterator[str]:
    """Yield every file, function and class that is over its limit."""
    for name, tree in TREES.items():
        if len((ROOT / name).read_text("utf-8").splitlines()) > MAX_FILE_LINES:
            yield name
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION) and count_lines(node) > MAX_FUNCTION_LINES:
                yield f"{name} {node.name}"
            if isinstance(node, ast.ClassDef) and count_methods(node) > MAX_METHODS:
                yield f"{name} {node.name}"


def test_files_functions_and_classes_keep_their_limits_and_the_list_of_exceptions_only_shrinks():
    assert set(find_offenders()) == TOLERATED


def test_no_public_class_name_is_defined_twice():
    places = collections.defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_every_package_says_what_it_is_and_has_a_readme_of_at_most_40_lines():
    for name in sorted(name for name in TREES if name.endswith("__init__.py")):
        readme = (ROOT / name).with_name("README.md")
        assert ast.get_docstring(TREES[name]), name
        assert readme.exists(), readme
        assert len(readme.read_text("utf-8").splitlines()) <= MAX_README_LINES, readme
