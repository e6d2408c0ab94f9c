"""What a worker keeps of a world's programs when it leaves the world: nothing."""

import threading

import jax
import pytest

from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler, CompilationJob
from resilient_jax.ids import ProcessIndex
from resilient_jax.step import host_grid
from resilient_jax.worker.generation_parts import drop_programs
from tests.support.patience import patience

WORK_S = 0.3
"""What the thread of the compiler still has to do, longer than it takes to drop all programs."""


@pytest.fixture
def compiler():
    compiler = AheadOfTimeCompiler(lambda name, seconds: None, lambda name, error: None)
    yield compiler
    compiler.close()


def test_what_is_compiled_ahead_while_a_world_is_left_is_dropped_too(compiler: AheadOfTimeCompiler) -> None:
    grid = host_grid.HostGrid(jax.devices()[:1], ProcessIndex(0))
    has_begun = threading.Event()

    def compile_late(check) -> bool:
        has_begun.set()
        threading.Event().wait(WORK_S)
        host_grid._pack(grid.local_mesh)
        return True

    compiler.enqueue([CompilationJob("late", compile_late)])
    assert has_begun.wait(patience(6))
    assert drop_programs(compiler)
    assert host_grid._pack.cache_info().currsize == 0
