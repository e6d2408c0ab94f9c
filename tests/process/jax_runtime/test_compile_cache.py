"""Compiled programs on disk are found by other processes, and only for the same code, shapes and flags."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support.full_only import full_but
from tests.support.patience import patience

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from tests.support.null_cache_hooks import NullCacheHooks

class Hooks(NullCacheHooks):
    missed_programs = []
    def missed(self, key, seconds):
        self.missed_programs.append(key.rpartition("-")[0])

factor, width = float(sys.argv[1]), int(sys.argv[2])
assert share_compilation_cache(Hooks(), 2**30) is None

@jax.jit
def program(x):
    return jnp.tanh(x) * factor

found = program(np.ones(width, np.float32))
print(json.dumps({"missed": "jit_program" in Hooks.missed_programs, "found": np.asarray(found).tolist()}))
"""
TANH_OF_1 = 0.7615941559557649


def run(cache, *, factor=2.0, width=3, flags=""):
    """Return whether the program had to be compiled, and its result."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(factor), str(width)],
        capture_output=True,
        text=True,
        timeout=patience(12),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_FLAGS": flags,
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["found"] == pytest.approx([TANH_OF_1 * factor] * width, rel=1e-5)
    return said["missed"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    assert run(folder), "nothing is there yet"
    return folder


def test_another_process_finds_the_same_program(cache):
    assert not run(cache)


def test_a_program_is_found_in_a_folder_of_another_path(cache, tmp_path):
    moved = shutil.copytree(cache, tmp_path / "elsewhere")
    assert not run(moved)


@pytest.mark.parametrize(
    "change",
    full_but(
        [{"factor": 3.0}, {"width": 4}, {"flags": "--xla_cpu_enable_fast_math=true"}],
        lambda change: "flags" in change,  # code and shapes are in JAX's own key
    ),
    ids=["code", "shapes", "flags"],
)
def test_a_program_of_other_code_shapes_or_flags_is_a_miss(cache, change):
    assert run(cache, **change)
    assert not run(cache, **change), "and is found again itself"
    assert not run(cache)


@pytest.mark.parametrize("left", full_but([-40, 0], lambda left: left != 0), ids=["its end", "all"])
def test_a_truncated_entry_is_compiled_again_once_with_the_same_result(cache, left):
    entries = list(cache.glob("jit_program*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:left])
    assert run(cache)
    assert not run(cache), "the whole one took its place"
