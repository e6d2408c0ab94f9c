"""What a script imports is found in its text, with what forbids that it is imported before the script runs."""

import os
from pathlib import Path

import pytest

import resilient_jax
from resilient_jax.worker.script_imports import ALWAYS_IMPORTED, find_script_imports


def write(folder: Path, **files: str) -> str:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / "script.py")


def find_more(script: str) -> list[str]:
    found = find_script_imports(script)
    assert found.obstacle == ""
    return [name for name in found.modules if name not in ALWAYS_IMPORTED]


def test_libraries_are_found_in_the_order_of_the_text_also_behind_conditions(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        script="import optax\ntry:\n    import flax.linen as nn\nexcept ImportError:\n    from flax import nnx\n",
    )
    assert find_more(script) == ["optax", "flax.linen", "flax", "flax.nnx"]


def test_imports_in_functions_and_of_other_packages_are_left_to_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, script="import json, yaml, wandb\n\ndef main():\n    import optax\n")
    assert find_more(script) == []


def test_what_modules_beside_the_script_import_counts(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        script="from model import layers\nimport data\n",
        model__layers="from flax import linen\n",
        data="import optax\n",
    )
    (tmp_path / "model" / "__init__.py").write_text("")
    assert sorted(find_more(script)) == ["flax", "flax.linen", "optax"]


def test_modules_on_the_python_path_are_the_users_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "lib", helpers="import optax\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    assert find_more(write(tmp_path, script="import helpers\n")) == ["optax"]


def test_a_library_on_the_python_path_is_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(resilient_jax.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(root))
    assert find_more(write(tmp_path, script="import resilient_jax.trainer.trainer\n")) == [
        "resilient_jax.trainer.trainer"
    ]


def test_a_module_of_the_user_with_the_name_of_a_library_is_not_imported(tmp_path: Path) -> None:
    assert find_more(write(tmp_path, script="import optax\n", optax="import flax\n")) == ["flax"]


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['JAX_ENABLE_X64'] = '1'",
        "environ['XLA_FLAGS'] = ''",
        "del os.environ['A']",
        "os.environ.setdefault('A', '1')",
        "os.environ.update(A='1')",
        "os.environ |= {'A': '1'}",
        "os.putenv('A', '1')",
        "load_dotenv()",
        "os.environb[b'A'] = b'1'",
        "variables = os.environ",
    ],
)
def test_a_script_that_sets_environment_variables_is_named_with_the_line(tmp_path: Path, change: str) -> None:
    script = write(tmp_path, script="import helpers\n", helpers=f"import os\n{change}\nimport jax\n")
    modules, obstacle = find_script_imports(script)
    assert modules == ()
    assert obstacle.startswith(f"{tmp_path / 'helpers.py'}, line 2: sets an environment variable")


def test_a_script_that_changes_the_search_path_is_named_with_the_line(tmp_path: Path) -> None:
    for change in ("sys.path.insert(0, 'vendored')", "sys.path = ['a', *sys.path]", "sys.path[0] = 'a'"):
        script = write(tmp_path, script=f"import sys\n{change}\nimport jax\n")
        assert find_script_imports(script).obstacle == (
            f"{script}, line 2: changes the path on which modules are searched"
        )


def test_modules_that_are_imported_relatively_or_in_functions_are_read(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from . import inner\nfrom .deep import x\n")
    write(tmp_path / "package", inner="import flax\n", deep="import optax\n")
    script = write(
        tmp_path, script="def main():\n    import package\n    import late\n", late="import orbax\n"
    )
    assert sorted(find_more(script)) == ["flax", "optax", "orbax"]
    write(tmp_path, late="import os\nos.environ['JAX_ENABLE_X64'] = '1'\n")
    assert "late.py, line 2: sets an environment variable" in find_script_imports(script).obstacle


def test_reading_the_environment_is_no_obstacle(tmp_path: Path) -> None:
    script = write(
        tmp_path, script="import os\nA = os.environ['A'] + os.environ.get('B', '')\nimport optax\n"
    )
    assert find_more(script) == ["optax"]


def test_a_script_that_cannot_be_read_is_left_to_python(tmp_path: Path) -> None:
    assert "script.py" in find_script_imports(write(tmp_path, script="def (\n")).obstacle
    assert "missing.py" in find_script_imports(str(tmp_path / "missing.py")).obstacle
