"""What the wheel contains: every module, and the scripts and settings that commands run."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import patience

BUNDLED = ("examples", "configs", "meshes")
BUILD_TIMEOUT_S = patience(12)
FIND = """
import sys
from resilient_jax.cli.demo import find_bundled_file
for path in sys.argv[1:]:
    print(find_bundled_file(path))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "lib")
    return folder / "lib"


def list_sources() -> list[str]:
    """The files that the wheel must contain, by their paths in the source tree."""
    paths = [*(ROOT / "resilient_jax").rglob("*.py")]
    for folder in BUNDLED:
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_the_wheel_contains_all_modules_examples_settings_and_topologies(built: Path) -> None:
    inside = {
        path: path if path.startswith("resilient_jax/") else f"resilient_jax/{path}"
        for path in list_sources()
    }
    assert [path for path in inside.values() if not (built / path).is_file()] == []


def test_commands_find_their_files_without_a_checkout(built: Path, tmp_path: Path) -> None:
    wanted = ["examples/train_lm.py", "configs/lm_tiny_planned.toml", "meshes/local_4x2.toml"]
    done = subprocess.run(
        [sys.executable, "-c", FIND, *wanted],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.stdout.split() == [str(built / "resilient_jax" / path) for path in wanted], done.stderr


def test_an_example_starts_from_the_wheel_with_its_settings(built: Path, tmp_path: Path) -> None:
    script = built / "resilient_jax" / "examples" / "train_lm.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    default = built / "resilient_jax" / "configs" / "lm_tiny.toml"
    assert default.is_file()
    assert str(default) in done.stdout.replace("\n", "").replace(" ", "")
