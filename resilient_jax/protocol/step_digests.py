"""Digests of what a job computed, step by step, by which any step can be checked later (`resilient-jax replay`).

The first host of each generation appends to a file in its run folder: once a process, what it runs; and, every
`digest_interval_steps`, a line for a committed step. Written by `worker.digest_log`, read by `cli.replay`.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.message_decoding import decode_message


class RunEntry(msgspec.Struct, frozen=True, tag="run", kw_only=True):
    """What a worker process runs, and on what.

    Attributes:
        command: absolute path of the script, and its arguments.
        working_directory: directory in which the process was started.
        platform: JAX's name for the devices, such as "cpu".
        script: description of the script, as `describe_script` returns it.
        wall_s: when the process began, in seconds since 1970.
    """

    host: str
    command: tuple[str, ...]
    working_directory: str
    platform: str
    num_devices: int
    script: dict[str, str]
    wall_s: float


class SumDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of one accumulation's sum over all microbatches.

    Attributes:
        digest: hexadecimal digits.
        reduction: how microbatches were added up; the digest of a "fast" sum depends on the hosts.
        replica: the shape of the replicas, on which the bits of a microbatch depend.
    """

    digest: str
    num_microbatches: int
    reduction: str
    replica: str


class StepDigests(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """What was computed in one committed step.

    Attributes:
        step: index of the step; the state is the one after `step + 1` steps.
        sums: digests of the step's accumulations, by name.
        state: digest of the committed state; "" where no host has the whole state.
    """

    host: str
    generation: int
    step: int
    sums: dict[str, SumDigest]
    state: str


class ReplayRefused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """Why a step cannot be computed again; written by a replay only."""

    why: str


class ReplayBegun(msgspec.Struct, frozen=True, tag="begun", kw_only=True):
    """The step that a replay begins with, and so the number of steps in its first state."""

    step: int


DigestEntry = RunEntry | StepDigests | ReplayRefused | ReplayBegun

_DECODER: msgspec.json.Decoder[DigestEntry] = msgspec.json.Decoder(DigestEntry)
ENTRY_ENCODER = msgspec.json.Encoder()


def read_digest_logs(paths: Iterable[Path]) -> list[DigestEntry]:
    """Return all complete entries of these files, in the order of each; a line that was torn is skipped."""
    found: list[DigestEntry] = []
    for path in sorted(paths):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(MessageError):  # a full disk, or a writer that was killed
                found.append(decode_message(_DECODER, line, str(path)))
    return found
