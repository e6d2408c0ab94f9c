"""Compiled programs on disk are found by other processes, and only for the same code, shapes and flags."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support.forge import Forge
from tests.support.full_only import full_but
from tests.support.paths import ROOT
from tests.support.patience import patience

PROGRAM = "tests.process.jax_runtime.cached_program"
TANH_OF_1 = 0.7615941559557649


@pytest.fixture(scope="module")
def forge():
    """Other processes than that which fills the cache are forked: what they import is imported once."""
    found = Forge(PROGRAM, environment={**os.environ, "JAX_PLATFORMS": "cpu"})
    yield found
    found.end()


def make_run(cache, factor=2.0, width=3):
    """Return the arguments of a run, and what it is to give."""
    return [str(cache), str(factor), str(width)], pytest.approx([TANH_OF_1 * factor] * width, rel=1e-5)


def run(forge, cache, *, flags="", **change):
    """Return whether the program had to be compiled, after a check of its result."""
    arguments, expected = make_run(cache, **change)
    process = forge.start(f"{PROGRAM}:main", *arguments, environment={"XLA_FLAGS": flags})
    with process.stdin, process.stdout:
        said = process.stdout.read()
    assert process.wait(patience(12)) == 0
    found = json.loads(said)
    assert found["found"] == expected
    return found["missed"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a folder that a process has filled which hashes strings in another way than those that look there."""
    folder = tmp_path_factory.mktemp("cache")
    arguments, expected = make_run(folder)
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=patience(12),
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"missed": True, "found": expected}, "nothing is there yet"
    return folder


def test_another_process_finds_the_same_program(forge, cache):
    assert not run(forge, cache)


def test_a_program_is_found_in_a_folder_of_another_path(forge, cache, tmp_path):
    moved = shutil.copytree(cache, tmp_path / "elsewhere")
    assert not run(forge, moved)


@pytest.mark.parametrize(
    "change",
    full_but(
        [{"factor": 3.0}, {"width": 4}, {"flags": "--xla_cpu_enable_fast_math=true"}],
        lambda change: "flags" in change,  # code and shapes are in JAX's own key
    ),
    ids=["code", "shapes", "flags"],
)
def test_a_program_of_other_code_shapes_or_flags_is_a_miss(forge, cache, change):
    assert run(forge, cache, **change)
    assert not run(forge, cache, **change), "and is found again itself"
    assert not run(forge, cache)


@pytest.mark.parametrize("left", full_but([-40, 0], lambda left: left != 0), ids=["its end", "all"])
def test_a_truncated_entry_is_compiled_again_once_with_the_same_result(forge, cache, left):
    entries = list(cache.glob("jit_program*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:left])
    assert run(forge, cache)
    assert not run(forge, cache), "the whole one took its place"
