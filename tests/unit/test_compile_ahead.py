"""Programs compiled on a thread while training goes on: training finds them, and nothing else changes."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler, CompilationJob, is_compiling_ahead
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.compile_cache import CACHE_SUFFIX, evict_oldest
from resilient_jax.trainer.speculative_compilation import list_likely_hosts

PATIENCE_S = 60.0


@pytest.fixture
def said():
    return []


@pytest.fixture
def compiler(said):
    made = AheadOfTimeCompiler(
        lambda name, seconds: said.append((name, "compiled")), lambda name, why: said.append((name, why))
    )
    yield made
    made.close()


@pytest.fixture
def durations():
    """What JAX says it does for programs, with the thread."""
    found = []

    def listen(event, duration_secs, **_):
        if event.startswith("/jax/core/compile/"):
            found.append((event.rsplit("/", 1)[1], threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_call_of_what_was_compiled_ahead_traces_lowers_and_compiles_nothing(compiler, durations, said):
    program = jax.jit(lambda x: jnp.tanh(x) * 3)
    shape = jax.ShapeDtypeStruct((5,), jnp.float32)

    def prepare(check):
        assert is_compiling_ahead()
        program.lower(shape).compile()
        return True

    compiler.expect([CompilationJob("next", prepare)])
    assert compiler.wait(PATIENCE_S)
    assert said == [("next", "compiled")]
    mine = threading.current_thread().name
    assert [thread for _, thread in durations if thread == mine] == []
    np.testing.assert_allclose(program(np.ones(5, np.float32)), np.tanh(1) * 3, rtol=1e-6)
    assert [event for event, thread in durations if thread == mine] == []
    assert not is_compiling_ahead()


def test_what_is_expected_later_comes_after_what_waits_and_what_is_dropped_not_at_all(compiler, said):
    began, go_on = threading.Event(), threading.Event()

    def first(check):
        began.set()
        go_on.wait(PATIENCE_S)
        return True

    compiler.expect([CompilationJob("first", first), CompilationJob("dropped", lambda check: True)])
    began.wait(PATIENCE_S)
    compiler.drop()
    compiler.expect([CompilationJob("second", lambda check: True)])
    compiler.expect([CompilationJob("third", lambda check: True)])
    assert not compiler.wait(0.0), "it is still at work on the first"
    go_on.set()
    assert compiler.wait(PATIENCE_S)
    assert [name for name, _ in said] == ["first", "second", "third"]


def test_one_that_cannot_be_compiled_is_said_and_the_next_goes_on(compiler, said):
    def fail(check):
        raise ValueError("no such axis")

    compiler.expect(
        [
            CompilationJob("bad", fail),
            CompilationJob("good", lambda check: True),
            CompilationJob("known", lambda check: False),
        ]
    )
    assert compiler.wait(PATIENCE_S)
    assert said == [("bad", "ValueError: no such axis"), ("good", "compiled")]


def test_a_job_that_is_dropped_ends_before_its_next_program_and_is_not_said_to_be_ready(compiler, said):
    began, go_on, went_on = threading.Event(), threading.Event(), threading.Event()

    def two(check):
        check()
        began.set()
        go_on.wait(PATIENCE_S)
        check()
        went_on.set()
        return True

    compiler.expect([CompilationJob("two", two)])
    began.wait(PATIENCE_S)
    compiler.drop()
    go_on.set()
    assert compiler.wait(PATIENCE_S)
    assert not went_on.is_set()
    assert said == []


def test_what_is_expected_for_later_is_not_begun_before(compiler, said):
    compiler.expect([CompilationJob("later", lambda check: True)], after_s=0.2)
    assert not compiler.wait(0.05)
    assert said == []
    assert compiler.wait(PATIENCE_S)
    assert said == [("later", "compiled")]


def test_likely_worlds_are_one_fewer_then_one_back_then_two_fewer():
    a, b, c, d = (HostName(name) for name in "abcd")
    assert list(list_likely_hosts((a, b, c), (a, b, c, d))) == [
        *[(b, c), (a, c), (a, b)],
        (a, b, c, d),
        *[(c,), (b,), (a,)],
    ]
    assert list(list_likely_hosts((a,), (a,))) == []


def test_a_full_cache_drops_what_was_used_longest_ago_and_never_the_newest(tmp_path):
    for age, name in enumerate(["old", "older", "oldest"]):
        path = tmp_path / f"{name}{CACHE_SUFFIX}"
        path.write_bytes(bytes(1000))
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "not-ours").write_bytes(bytes(5000))
    half, abandoned = (tmp_path / f".{name}{CACHE_SUFFIX}.0123" for name in ("half", "abandoned"))
    half.write_bytes(bytes(5000))
    abandoned.write_bytes(bytes(5000))
    os.utime(abandoned, (1000, 1000))
    assert evict_oldest(tmp_path, 2500) == 1
    assert half.exists()
    assert not abandoned.exists()
    assert not (tmp_path / f"oldest{CACHE_SUFFIX}").exists()
    assert evict_oldest(tmp_path, 10) == 1
    assert (tmp_path / f"old{CACHE_SUFFIX}").exists()
    assert (tmp_path / "not-ours").exists()
