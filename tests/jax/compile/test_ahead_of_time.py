"""A program compiled on the background thread is found by `jax.jit`, and nothing else changes."""

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
from tests.support.patience import patience

TIMEOUT_S = patience(6)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def compiler(reports):
    made = AheadOfTimeCompiler(
        lambda name, seconds: reports.append((name, "compiled")),
        lambda name, why: reports.append((name, why)),
    )
    yield made
    made.close()


@pytest.fixture
def durations():
    """Yield JAX's compilation events as (phase, name of the thread)."""
    found = []

    def listen(event, duration_secs, **_):
        if event.startswith("/jax/core/compile/"):
            found.append((event.rsplit("/", 1)[1], threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_calling_a_program_compiled_ahead_traces_lowers_and_compiles_nothing(compiler, durations, reports):
    program = jax.jit(lambda x: jnp.tanh(x) * 3)
    shape = jax.ShapeDtypeStruct((5,), jnp.float32)

    def prepare(check):
        assert is_compiling_ahead()
        program.lower(shape).compile()
        return True

    compiler.enqueue([CompilationJob("next", prepare)])
    assert compiler.wait_until_idle(TIMEOUT_S)
    assert reports == [("next", "compiled")]
    mine = threading.current_thread().name
    assert [thread for _, thread in durations if thread == mine] == []
    np.testing.assert_allclose(program(np.ones(5, np.float32)), np.tanh(1) * 3, rtol=1e-6)
    assert [event for event, thread in durations if thread == mine] == []
    assert not is_compiling_ahead()


def test_jobs_run_in_the_order_they_were_enqueued_and_canceled_ones_do_not_run(compiler, reports):
    began, go_on = threading.Event(), threading.Event()

    def first(check):
        began.set()
        go_on.wait(TIMEOUT_S)
        return True

    compiler.enqueue([CompilationJob("first", first), CompilationJob("canceled", lambda check: True)])
    began.wait(TIMEOUT_S)
    compiler.cancel()
    compiler.enqueue([CompilationJob("second", lambda check: True)])
    compiler.enqueue([CompilationJob("third", lambda check: True)])
    assert not compiler.wait_until_idle(0.0), "the first is still being compiled"
    go_on.set()
    assert compiler.wait_until_idle(TIMEOUT_S)
    assert [name for name, _ in reports] == ["first", "second", "third"]


def test_a_job_that_fails_is_reported_and_the_next_one_runs(compiler, reports):
    def fail(check):
        raise ValueError("no such axis")

    compiler.enqueue(
        [
            CompilationJob("bad", fail),
            CompilationJob("good", lambda check: True),
            CompilationJob("known", lambda check: False),
        ]
    )
    assert compiler.wait_until_idle(TIMEOUT_S)
    assert reports == [("bad", "ValueError: no such axis"), ("good", "compiled")]


def test_a_canceled_job_ends_before_its_next_program_and_is_not_reported_as_compiled(compiler, reports):
    began, go_on, went_on = threading.Event(), threading.Event(), threading.Event()

    def two(check):
        check()
        began.set()
        go_on.wait(TIMEOUT_S)
        check()
        went_on.set()
        return True

    compiler.enqueue([CompilationJob("two", two)])
    began.wait(TIMEOUT_S)
    compiler.cancel()
    go_on.set()
    assert compiler.wait_until_idle(TIMEOUT_S)
    assert not went_on.is_set()
    assert reports == []


def test_a_job_does_not_start_before_its_time(compiler, reports):
    compiler.enqueue([CompilationJob("later", lambda check: True)], after_s=0.2)
    assert not compiler.wait_until_idle(0.05)
    assert reports == []
    assert compiler.wait_until_idle(TIMEOUT_S)
    assert reports == [("later", "compiled")]


def test_likely_worlds_have_one_host_fewer_then_one_back_then_two_fewer():
    a, b, c, d = (HostName(name) for name in "abcd")
    assert list(list_likely_hosts((a, b, c), (a, b, c, d))) == [
        *[(b, c), (a, c), (a, b)],
        (a, b, c, d),
        *[(c,), (b,), (a,)],
    ]
    assert list(list_likely_hosts((a,), (a,))) == []


def test_a_full_cache_evicts_the_least_recently_used_program_and_never_the_newest(tmp_path):
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
