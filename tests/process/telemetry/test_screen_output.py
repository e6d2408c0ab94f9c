"""Output that nobody takes is kept, then dropped and counted; it never makes its process wait."""

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from resilient_jax.telemetry import screen_output
from resilient_jax.telemetry.screen_output import ScreenOutput, print_bytes, unblocked_output
from tests.support.patience import patience, wait_until

LINE = b"x" * 999 + b"\n"
PIPE_BYTES = 2**16


@contextlib.contextmanager
def opened_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def end_pipe(writer: int) -> None:
    """Close the pipe's end, but not its descriptor."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), writer)


def read_for_ever(reader: int, found: bytearray) -> threading.Thread:
    """Read what comes in a thread, until the pipe ends."""

    copy = os.dup(reader)

    def read() -> None:
        with os.fdopen(copy, "rb", buffering=0) as pipe:
            while chunk := pipe.read(2**16):
                found.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("is_blocking", [True, False])
def test_what_is_taken_late_is_complete_and_in_order(is_blocking: bool) -> None:
    lines = [b"%d\n" % number for number in range(100_000)]
    with contextlib.closing(os.fdopen(os.dup(0), "rb")), opened_pipe() as (reader, writer):
        if not is_blocking:
            fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
        output, found = ScreenOutput(writer), bytearray()
        for line in lines:
            output.print_bytes(line)
        thread = read_for_ever(reader, found)
        output.close(patience(3))
        wait_until("all lines", lambda: len(found) == sum(map(len, lines)))
        end_pipe(writer)
        thread.join()
    assert bytes(found) == b"".join(lines)


def test_the_oldest_lines_are_dropped_and_one_line_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_output, "MAX_KEPT_BYTES", 10_000)
    count = 1000
    with opened_pipe() as (reader, writer):
        output, found = ScreenOutput(writer), bytearray()
        os.write(writer, b"-" * (PIPE_BYTES - 1) + b"\n")
        for number in range(count):
            output.print_bytes(b"%03d" % number + LINE[3:])
        thread = read_for_ever(reader, found)
        output.close(patience(3))
        wait_until("the last line", lambda: b"\n999" in found)
        end_pipe(writer)
        thread.join()
    lines = found[PIPE_BYTES:].decode().splitlines()
    due = 0
    for line in lines:  # in the place of each line that is lost there is one that counts it
        if (
            lost := re.fullmatch(r"\((\d+) lines were lost here: nobody took this output\)", line)
        ) is not None:
            due += int(lost[1])
        else:
            assert int(line[:3]) == due
            due += 1
    assert due == count
    assert len(lines) < count // 2


def test_the_end_does_not_wait_for_a_reader_that_takes_nothing() -> None:
    with opened_pipe() as (reader, writer):
        output = ScreenOutput(writer)
        output.print_bytes(LINE * 200)
        output.close(0.05)
        assert len(os.read(reader, 2**20)) == PIPE_BYTES


def test_lines_that_a_full_disk_refuses_are_counted() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with opened_pipe() as (reader, writer):
        output = ScreenOutput(full)
        output.print_bytes(b"a\nb\n")
        wait_until("the refusal", lambda: output._num_lost == 2)
        os.dup2(writer, full)  # there is space again
        output.print_bytes(b"c\n")
        output.close(patience(1))
        assert os.read(reader, 2**16) == b"(2 lines were lost here: nobody took this output)\nc\n"
    os.close(full)


def test_a_process_prints_all_before_it_ends() -> None:
    script = (
        "import sys\n"
        "from resilient_jax.telemetry.screen_output import print_bytes, unblocked_output\n"
        "with unblocked_output():\n"
        "    for n in range(50_000): print_bytes(b'%d\\n' % n)\n"
        "    print('an error', file=sys.stderr)\n"
        "print_bytes(b'last\\n')\n"
        "print('last error', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=patience(3), check=True
    )
    assert done.stdout.decode().split() == [*map(str, range(50_000)), "last"]
    assert done.stderr == b"an error\nlast error\n"


def test_a_closed_output_is_no_error() -> None:
    script = (
        "from resilient_jax.telemetry.screen_output import print_bytes, unblocked_output\n"
        "print_bytes(b'a')\n"
        "with unblocked_output(): print_bytes(b'b')\n"
    )
    shell = f'{sys.executable} -c "{script}" >&- 2>&-; echo $?'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, timeout=patience(3), check=True)
    assert done.stdout == b"0\n"


def test_outside_of_a_job_output_waits_for_its_reader(capfd: pytest.CaptureFixture[str]) -> None:
    with unblocked_output():
        print_bytes(b"handed over\n")
    print_bytes(b"written\n")
    assert capfd.readouterr().out == "handed over\nwritten\n"
