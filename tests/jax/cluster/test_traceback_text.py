"""What a user sees of a traceback: the frames that help, of all causes."""

import asyncio
import traceback
from collections.abc import Callable

import pytest

import resilient_jax as rj
from resilient_jax.cluster import worker_output
from resilient_jax.cluster.traceback_text import find_last_chain, shorten_traceback
from resilient_jax.cluster.worker_output import WorkerOutput


def read_traceback(fail: Callable[[], object]) -> str:
    try:
        fail()
    except Exception as error:
        return "".join(traceback.format_exception(error)).rstrip()
    raise AssertionError("nothing was raised")


def fail_in_users_code():
    def train(world):
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("my own") from error

    rj.run(train)


def fail_by_a_wrong_argument():
    rj.run(7)  # pyright: ignore[reportArgumentType]


def fail_by_a_bug_of_ours():
    shorten_traceback(7)  # pyright: ignore[reportArgumentType]


def list_frames(text: str) -> list[str]:
    return [line.rpartition(", in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def test_of_an_error_in_the_users_code_the_users_frames_and_the_cause_are_left():
    text = read_traceback(fail_in_users_code)
    assert "_run_standalone" in list_frames(text)
    shown = shorten_traceback(text)
    assert list_frames(shown) == ["train", "read_traceback", "fail_in_users_code", "train"]
    assert "The above exception was the direct cause" in shown
    assert shown.startswith("Traceback")
    assert shown.endswith("RuntimeError: my own")


def test_of_our_error_only_the_users_frames_are_left():
    shown = shorten_traceback(read_traceback(fail_by_a_wrong_argument))
    assert list_frames(shown) == ["read_traceback", "fail_by_a_wrong_argument"]
    assert "\nresilient_jax.errors.CallerError: run: found" in shown


def test_of_an_exception_that_we_never_meant_to_raise_all_frames_are_left():
    text = read_traceback(fail_by_a_bug_of_ours)
    assert "shorten_traceback" in list_frames(text)
    assert shorten_traceback(text) == text


@pytest.mark.parametrize("fail", [fail_in_users_code, fail_by_a_wrong_argument])
def test_the_last_traceback_of_an_output_begins_with_its_first_cause(fail: Callable[[], object]):
    text = read_traceback(fail)
    lines = [*read_traceback(fail_by_a_bug_of_ours).splitlines(), "a warning", *text.splitlines()]
    start = find_last_chain(lines)
    assert start is not None
    assert "\n".join(lines[start:]) == text


def test_no_traceback_is_found_where_there_is_none():
    assert find_last_chain(["a warning", "an error"]) is None


def write_traceback(output: WorkerOutput) -> None:
    for line in read_traceback(fail_by_a_wrong_argument).splitlines():
        output.write(line.encode(), is_error=True)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(worker_output, "print_bytes", lambda text: shown.append(text.decode()))
    return shown


def test_a_traceback_is_complete_in_the_log_and_shortened_on_the_screen(tmp_path, screen):
    async def write() -> list[str]:
        output = WorkerOutput("host-0", tmp_path / "log")
        write_traceback(output)
        before = list(screen)
        output.close()
        return before

    assert asyncio.run(write()) == [], "it was not held back"
    assert all(line.startswith("[host-0] ") for line in screen)
    assert len(list_frames("\n".join(line.removeprefix("[host-0] ") for line in screen))) == 2
    assert "run: found" in screen[-1]
    assert "_check_arguments" in (tmp_path / "log").read_text()


def test_with_every_line_asked_for_nothing_is_held_back(screen):
    write_traceback(WorkerOutput("host-0", None, show_all=True))
    assert any("_check_arguments" in line for line in screen)
