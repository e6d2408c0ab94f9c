"""The ledger: what was committed, step by step, as each worker saw it, to check a job's guarantees from outside.

A controller names a directory in the environment; each worker then appends to a file of its own there. Without the
variable nothing is computed or written. Entries are written by `worker.ledger` and read by `chaos`.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.message_decoding import decode_message

LEDGER_VARIABLE = "RESILIENT_JAX_LEDGER"


class StepEntry(msgspec.Struct, frozen=True, tag="committed", kw_only=True):
    """One host has committed a step.

    Attributes:
        step: index of the step that is done.
        num_hosts: hosts that commit the step in this generation.
        state_sha256: SHA-256 of the complete state after the step; empty where the host has only a part of it.
        additive_digest: digest of this host's part of the state, in 32 hexadecimal digits: those of all hosts add up,
            modulo 2^128, to the same number however the state is sharded.
        owners: hosts that computed each microbatch, by the name of the reduction.
    """

    host: str
    pid: int
    generation: int
    step: int
    num_hosts: int
    monotonic_s: float
    state_sha256: str
    additive_digest: str
    owners: dict[str, tuple[str, ...]]


class RestoreEntry(msgspec.Struct, frozen=True, tag="restored", kw_only=True):
    """One host resumes from a state that it did not compute in this generation; other fields as in `StepEntry`.

    Attributes:
        num_steps: committed steps in the state.
    """

    host: str
    pid: int
    generation: int
    num_steps: int
    num_hosts: int
    monotonic_s: float
    state_sha256: str
    additive_digest: str


class MicrobatchEntry(msgspec.Struct, frozen=True, tag="begun", kw_only=True):
    """One host began to compute a microbatch."""

    host: str
    pid: int
    generation: int
    step: int
    index: int


LedgerEntry = StepEntry | RestoreEntry | MicrobatchEntry

ENTRY_DECODER: msgspec.json.Decoder[LedgerEntry] = msgspec.json.Decoder(LedgerEntry)
ENTRY_ENCODER = msgspec.json.Encoder()


def read_ledger(paths: Iterable[Path]) -> list[LedgerEntry]:
    """Return all complete entries of these files, in the order of each; a torn last line (its writer was killed) is
    skipped.
    """
    lines: list[LedgerEntry] = []
    for path in sorted(paths):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(MessageError):  # torn by a full disk: no entry
                lines.append(decode_message(ENTRY_DECODER, line, str(path)))
    return lines
