"""What a traceback says in short, and whom its text blames."""

import pytest

from resilient_jax.health.error_texts import Blame, summarize_error

HEADING = "Traceback (most recent call last):"


def trace(line: str, *, source: str = "    f()") -> str:
    return "\n".join(
        [
            HEADING,
            '  File "/home/u/train.py", line 9, in <module>',
            "    rj.run(train)",
            '  File "/home/u/train.py", line 40, in train',
            source,
            '  File "/venv/lib/python3.11/site-packages/zarr/core.py", line 7, in read',
            "    return g()",
            "           ^^^",
            line,
        ]
    )


def test_an_error_is_known_by_its_type_and_the_innermost_line_of_the_script() -> None:
    found = summarize_error(trace("zarr.errors.ReadError: shard 7\nis short"))
    assert (found.what, found.place, found.message) == (
        "zarr.errors.ReadError",
        "train.py:40",
        "zarr.errors.ReadError: shard 7",
    )


def test_of_a_chain_the_error_that_was_raised_last_counts() -> None:
    text = (
        f"{trace('KeyError: 3')}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    assert summarize_error(text + trace("ValueError: no 3")).what == "ValueError"


def test_a_syntax_error_has_the_place_that_is_wrong() -> None:
    found = summarize_error('  File "/home/u/train.py", line 3\n    if x\n        ^\nSyntaxError: expected :')
    assert (found.what, found.place, found.blame) == ("SyntaxError", "train.py:3", Blame.PROGRAM)


def test_an_exception_group_is_read_without_its_margins() -> None:
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/home/u/train.py", line 4, in <module>\n  |     f()\n'
        "  | ExceptionGroup: two (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
        '    | Traceback (most recent call last):\n    |   File "/home/u/train.py", line 5, in f\n'
        "    | ValueError: one\n    +------------------------------------\n"
    )
    assert summarize_error(text).what in ("ValueError", "ExceptionGroup")


@pytest.mark.parametrize(
    "text", ["", "the script exited with code 7 and wrote nothing to standard error", "\n"]
)
def test_a_text_without_an_exception_is_none(text: str) -> None:
    assert (summarize_error(text).what, summarize_error(text).blame) == ("", Blame.UNKNOWN)


@pytest.mark.parametrize(
    ("line", "blame"),
    [
        ("IndentationError: unexpected indent", Blame.PROGRAM),
        ("ImportError: cannot import name 'Modle' from 'models' (/home/u/models.py)", Blame.PROGRAM),
        ("resilient_jax.errors.CallerError: run: found 7", Blame.PROGRAM),
        ("resilient_jax.planning.errors.PlanError: no plan fits", Blame.PROGRAM),
        ("ModuleNotFoundError: No module named 'zarr'", Blame.UNKNOWN),
        ("ValueError: bad batch", Blame.UNKNOWN),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x'", Blame.UNKNOWN),
        ("MemoryError", Blame.UNKNOWN),
        (
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9",
            Blame.UNKNOWN,
        ),
        (
            "jax.errors.JaxRuntimeError: INTERNAL: Failed to synchronize: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal "
            "memory access was encountered",
            Blame.DEVICE,
        ),
        ("JaxRuntimeError: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error", Blame.DEVICE),
        ("JaxRuntimeError: INTERNAL: CUDNN_STATUS_EXECUTION_FAILED", Blame.DEVICE),
        ("JaxRuntimeError: INTERNAL: NCCL operation failed: unhandled cuda error", Blame.DEVICE),
        ("JaxRuntimeError: INTERNAL: NCCL operation failed: ncclSystemError", Blame.HOST),
        ("RuntimeError: ncclRemoteError: remote process exited or there was a network error", Blame.NETWORK),
        ("OSError: [Errno 5] Input/output error: '/data/7'", Blame.HOST),
        ("OSError: [Errno 28] No space left on device", Blame.HOST),
        ("OSError: [Errno 24] Too many open files: 'x'", Blame.HOST),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", Blame.NETWORK),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool: Read timed out.", Blame.NETWORK),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", Blame.NETWORK),
    ],
)
def test_a_text_of_the_table_blames_whom_it_says(line: str, blame: Blame) -> None:
    assert summarize_error(trace(line)).blame is blame


def test_a_line_of_source_blames_nobody() -> None:
    source = '    raise ValueError("no CUDA_ERROR_ECC_UNCORRECTABLE here")'
    assert summarize_error(trace("ValueError: bad batch", source=source)).blame is Blame.UNKNOWN


def test_what_led_to_an_error_is_blamed_too_but_not_the_program() -> None:
    link = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    for line, blame in {
        "OSError: [Errno 5] Input/output error": Blame.HOST,
        "SyntaxError: invalid syntax": Blame.UNKNOWN,
    }.items():
        assert summarize_error(trace(line) + link + trace("ValueError: shard 7")).blame is blame
