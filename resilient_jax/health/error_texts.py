"""What the text of an error says about its cause: the table, and the traceback as it reads it. Pure.

A text is matched with the messages of a traceback alone, never with its lines of source. What is not in the table may
be anything: a program's fault on all hosts, or a host's that nobody has seen before. Out of memory is not in it on
purpose (`MemoryError`, XLA's RESOURCE_EXHAUSTED, CUDA_ERROR_OUT_OF_MEMORY): where two hosts have no memory left at the
same line of the same step, the batch is too large, and where one has not, another process on it took the memory.
"""

import dataclasses
import enum
import errno
import re
from collections.abc import Iterator
from typing import Final


class Blame(enum.StrEnum):
    """Whose fault an error is, as far as its text tells."""

    PROGRAM = "program"
    """It is the same on every host, and whenever it is tried."""
    DEVICE = "device"
    HOST = "host"
    NETWORK = "network"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorText:
    """A row of the table: which messages, and what they mean."""

    blame: Blame
    pattern: re.Pattern[str]


def _row(blame: Blame, *alternatives: str) -> ErrorText:
    return ErrorText(blame, re.compile("|".join(alternatives)))


def _errnos(*names: str) -> str:
    """Return a pattern of Python's text of an `OSError`, for those of these names that this system has."""
    numbers = sorted({str(getattr(errno, name)) for name in names if hasattr(errno, name)})
    return rf"\[Errno (?:{'|'.join(numbers)})\]"


ERROR_TEXTS: Final[tuple[ErrorText, ...]] = (
    # The compiler of Python, and its import of a name that a module does not define (docs.python.org, Built-in
    # Exceptions). A module that is not found may be missing on one host alone: that is in no row.
    _row(
        Blame.PROGRAM, r"^(?:SyntaxError|IndentationError|TabError)\b", r"^ImportError: cannot import name\b"
    ),
    # Refusals of this package, of an argument, a configuration or a file that all hosts have in common (errors.py).
    _row(
        Blame.PROGRAM,
        r"^(?:resilient_jax[\w.]*\.)?(?:CallerError|ConfigError|StateError|SnapshotRefused|PlanError|RouteError|"
        r"TopologyError|ErasureCodeError|CheckpointUnreadable)\b",
    ),
    # NVIDIA CUDA Driver API, CUresult: names, and what cuGetErrorString says of them. XLA quotes both
    # (xla/stream_executor/cuda/cuda_status.cc). An illegal address may be a kernel's fault as well: whether the device
    # is taken out is for NVML to say.
    _row(
        Blame.DEVICE,
        r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|"
        r"ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR|CONTAINED|DEVICE_UNAVAILABLE|NO_DEVICE|"
        r"INVALID_DEVICE|EXTERNAL_DEVICE|UNKNOWN)\b",
        r"an illegal memory access was encountered",
        r"an illegal instruction was encountered",
        r"unspecified launch failure",
        r"uncorrectable ECC error encountered",
        r"uncorrectable NVLink error",
        r"hardware stack error",
    ),
    # NVIDIA driver, as the kernel logs it and libraries quote it (docs.nvidia.com/deploy/xid-errors).
    _row(Blame.DEVICE, r"GPU has fallen off the bus", r"\bGPU is lost\b"),
    # cuDNN API, cudnnStatus_t; cuBLAS, cublasStatus_t; cuSOLVER, cusolverStatus_t; cuFFT, cufftResult. "Not supported"
    # and "bad parameter" are the program's, and in no row.
    _row(
        Blame.DEVICE,
        r"CUDNN_STATUS_(?:EXECUTION_FAILED\w*|INTERNAL_ERROR\w*|MAPPING_ERROR)\b",
        r"CU(?:BLAS|SOLVER|SPARSE)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)\b",
        r"CUFFT_(?:EXEC_FAILED|INTERNAL_ERROR)\b",
    ),
    # NCCL API, ncclResult_t, and ncclGetErrorString (nccl/src/init.cc).
    _row(Blame.DEVICE, r"ncclUnhandledCudaError", r"unhandled cuda error"),
    _row(Blame.HOST, r"ncclSystemError", r"unhandled system error"),
    _row(Blame.NETWORK, r"ncclRemoteError", r"remote process exited or there was a network error"),
    # The driver of a host does not fit, or its fabric manager does not run (CUDA Driver API, CUresult 802 to 804).
    _row(
        Blame.HOST,
        r"CUDA_ERROR_(?:SYSTEM_NOT_READY|SYSTEM_DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED_ON_DEVICE|NOT_INITIALIZED)\b",
        r"CUDNN_STATUS_NOT_INITIALIZED\b",
        r"CUDA driver version is insufficient",
        r"cannot open shared object file",
    ),
    # errno(3): what a host's disks, mounts and tables are out of. "No such file" and "permission denied" may be either.
    _row(
        Blame.HOST,
        _errnos(
            *(
                "EIO",
                "EREMOTEIO",
                "ENODEV",
                "ENXIO",
                "EROFS",
                "ENOSPC",
                "EDQUOT",
                "ESTALE",
                "EUCLEAN",
                "ENOTCONN",
            ),
            *("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOBUFS"),
        ),
        r"Input/output error",
        r"No space left on device",
        r"Stale file handle",
        r"Too many open files",
        r"can't start new thread",
    ),
    # errno(3) of sockets, with Python's classes of them (docs.python.org, OS exceptions), and getaddrinfo(3).
    _row(
        Blame.NETWORK,
        _errnos(
            *(
                "ECONNRESET",
                "ECONNREFUSED",
                "ECONNABORTED",
                "EPIPE",
                "ETIMEDOUT",
                "ENETUNREACH",
                "EHOSTUNREACH",
            ),
            *("ENETDOWN", "EHOSTDOWN", "ENETRESET", "ESHUTDOWN"),
        ),
        r"^(?:ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|BrokenPipeError|TimeoutError)\b",
        r"(?:Temporary failure in name resolution|Name or service not known)",
        r"(?:Read|Connection|connection) timed out",
        r"[Cc]onnection (?:reset|aborted|refused)\b",
    ),
)
"""The first row that matches counts."""

HEADING: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)')
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|/resilient_jax/(?!cli/demo/)|^<")
_TYPE: Final = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")
_MARGIN: Final = re.compile(r"^(?:  )+[|+] ?")
"""Of the traceback of an exception group."""


@dataclasses.dataclass(slots=True)
class _Section:
    """One exception of a traceback's chain."""

    places: list[tuple[str, int]]
    message: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorSummary:
    """What a traceback says in short.

    Attributes:
        what: the type of the exception, with the name of its module as the traceback has it; empty: the text is no
            traceback.
        place: the innermost line of the script's own, or else of any library, as FILE:LINE; empty: there is no frame.
    """

    what: str
    place: str
    message: str
    blame: Blame


def summarize_error(text: str) -> ErrorSummary:
    """Return what a traceback, or an exception's line alone, says in short."""
    sections = list(_read_sections(text))
    if not sections:
        return ErrorSummary("", "", "", Blame.UNKNOWN)
    last = sections[-1]
    found = _TYPE.match(last.message[0]) if last.message else None
    own = [place for place in last.places if not _LIBRARY.search(place[0])] or last.places
    place = f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""
    first_line = last.message[0] if last.message else ""
    return ErrorSummary(found[0] if found else "", place, first_line, _blame(sections))


def _blame(sections: list[_Section]) -> Blame:
    """Return whose fault it is: as the exception says, else as what led to it; the program's only as that says."""
    messages = ["\n".join(section.message) for section in reversed(sections)]
    for number, message in enumerate(messages):
        blame = _look_up(message)
        if blame is not Blame.UNKNOWN and (blame is not Blame.PROGRAM or number == 0):
            return blame
    return Blame.UNKNOWN


def _look_up(message: str) -> Blame:
    return next((row.blame for row in ERROR_TEXTS if row.pattern.search(message)), Blame.UNKNOWN)


def _read_sections(text: str) -> Iterator[_Section]:
    """Read the exceptions of a traceback, the one that was raised last at the end."""
    section: _Section | None = None
    is_group = "Exception Group Traceback" in text
    for line in text.strip("\n").splitlines():
        line = _MARGIN.sub("", line) if is_group else line
        frame = _FRAME.match(line)
        begins = line.endswith(HEADING) or (
            frame is not None and section is not None and bool(section.message)
        )
        if begins or section is None:
            if section is not None and (section.message or section.places):
                yield section
            section = _Section([], [])
            if line.endswith(HEADING):
                continue
        if frame is not None:
            section.places.append((frame["file"], int(frame["line"])))
        elif section.message or not line.startswith(" "):
            section.message.append(line)
    if section is not None:
        yield section
