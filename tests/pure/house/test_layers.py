"""The layers of the design, as data, and the rules that every source file keeps.

- An import points down: to a strictly lower layer, or into its own package; never to the tests, which no wheel has.
- Only the starred packages import JAX and its kin, anywhere in a file.
- Importing `resilient_jax` or a package without a star loads neither JAX nor, but for the planner, numpy.
- A machine imports no clock, thread, socket or randomness.
- No import stands inside a function, except where an `__init__` loads its names lazily.
"""

import ast

import pytest

from tests.support.layers import (
    FILES,
    JAX_AND_KIN,
    LATE_LOADERS,
    LAYER_OF,
    MACHINES,
    PURE_LIBRARIES,
    ROOT_NAME,
    STARRED,
    find_imports,
    find_upward_imports,
    package_of,
)

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.module)

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
    "of the tests": ("resilient_jax.cli.main", "from tests.chaos.runner import run_campaign"),
    "at run time": ("resilient_jax.store.memory", "importlib.import_module('resilient_jax.cluster')"),
}


@each_file
def test_a_file_belongs_to_a_layer(file):
    package = package_of(file.module)
    assert package in LAYER_OF, (
        f"{file.path}: give the package {package!r} its layer, in LAYERS and design.md"
    )


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
