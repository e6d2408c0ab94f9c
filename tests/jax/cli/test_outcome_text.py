"""What is said of a job whose script failed: the exception, without what JAX adds to it."""

import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from resilient_jax.cli.outcome_text import describe_for_agent, describe_for_launch, extract_exception_line
from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind


def read_traceback(fail: Callable[[], object]) -> str:
    """Return the traceback that a worker reports."""
    try:
        fail()
    except Exception as error:
        return "".join(traceback.format_exception(error)).strip()
    raise AssertionError("nothing was raised")


def multiply():
    return jax.jit(lambda x: x @ jnp.ones((7, 2)))(jnp.ones((5, 3)))


def branch():
    return jax.jit(lambda x: 1.0 if x > 0 else 0.0)(1.0)


def chain():
    try:
        int("x")
    except ValueError as error:
        raise RuntimeError("no config:\n- one\n- two") from error


def group():
    raise ExceptionGroup("several", [ValueError("a"), ExceptionGroup("more", [TypeError("b")])])


def call_back():
    def fail(x):
        raise KeyError("inside")

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.jit(lambda x: jax.pure_callback(fail, shape, x))(1.0).block_until_ready()


def group_in_jit():
    return jax.jit(lambda x: group())(1.0)


def annotate():
    error = KeyError("missing")
    error.add_note("of a config")
    raise error


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (
            multiply,
            "TypeError: dot_general requires contracting dimensions to have the same shape, got (3,) and (7,).",
        ),
        (branch, "jax.errors.TracerBoolConversionError: Attempted boolean conversion of traced array"),
        (chain, "RuntimeError: no config:"),
        (group, "ExceptionGroup: several (2 sub-exceptions)"),
        (group_in_jit, "ExceptionGroup: several (2 sub-exceptions)"),
        (call_back, "KeyError: 'inside'"),
        (annotate, "KeyError: 'missing'"),
    ],
)
def test_the_exception_is_quoted_without_frames_and_notes(fail, said):
    text = read_traceback(fail)
    assert extract_exception_line(text).startswith(said)
    # Alone, or as what the last line says: so the test would notice if it were taken.
    assert not text.splitlines()[-1].startswith(said)


def test_any_other_message_is_quoted_as_it_is():
    message = "the script ended before rj.run(...) had returned;\ncall it"
    assert extract_exception_line(message) == message


@pytest.mark.parametrize("fail", [multiply, group_in_jit])
def test_launch_shows_no_note_of_jax(fail, tmp_path):
    text = read_traceback(fail)
    assert "For simplicity, JAX has removed" in text
    outcome = JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=1, message=text)
    assert "JAX has removed" not in describe_for_launch(outcome, tmp_path, {})


def test_launch_ends_with_the_error_and_an_agent_quotes_it(tmp_path):
    text = read_traceback(multiply)
    outcome = JobOutcome(
        kind=JobOutcomeKind.USER_ERROR, exit_code=1, host=HostName("host-1"), message=f"{text}\n"
    )
    shown = describe_for_launch(outcome, tmp_path, {}).splitlines()
    assert shown[1:3] == ["the job ended: user_error on host-1", "Traceback (most recent call last):"]
    assert shown[-1].startswith("TypeError: dot_general")
    quoted = describe_for_agent(outcome)
    assert quoted.startswith("the job ended: user_error on host-1: TypeError: dot_general")
    assert "\n" not in quoted


def test_the_error_of_all_hosts_is_shown_once_with_their_names_and_another_in_one_line(tmp_path):
    same, other = read_traceback(multiply), read_traceback(annotate)
    hosts = [HostName(f"host-{index}") for index in range(3)]
    outcome = JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=1, host=hosts[2], message=same)
    shown = describe_for_launch(
        outcome, tmp_path, dict(zip(hosts, (same, other, same), strict=True))
    ).splitlines()
    assert shown[1] == "another error on host-1: KeyError: 'missing' (complete in host-1.log)"
    assert shown[2:4] == ["the job ended: user_error on host-0, host-2", "Traceback (most recent call last):"]
    assert sum("Traceback" in line for line in shown) == 1


def test_a_script_that_fails_after_training_is_shown_with_its_error(tmp_path):
    host = HostName("host-0")
    message = "training was done, but then the script failed with code 1"
    outcome = JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=1, host=host, message=message)
    shown = describe_for_launch(outcome, tmp_path, {host: read_traceback(annotate)}).splitlines()
    assert shown[1:4] == [
        "the job ended: user_error on host-0",
        message,
        "Traceback (most recent call last):",
    ]
