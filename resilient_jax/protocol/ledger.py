"""What was committed, step by step, as each worker saw it: for whoever checks a job's promise from outside.

A controller names a folder in the environment; each worker then appends to a file of its own there. Without the
variable nothing is computed or written. Lines are written by `worker.ledger` and read by `chaos`.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

LEDGER_VARIABLE = "RESILIENT_JAX_LEDGER"


class StepEntry(msgspec.Struct, frozen=True, tag="committed", kw_only=True):
    """One host has committed a step.

    Attributes:
        process: that did, on its host.
        step: the index of the step that is done.
        hosts: so many commit it in this generation.
        sha256: of the whole state after the step; empty where the host has only a part of it.
        sum: of this host's part of the state, in 32 hexadecimal digits: those of all hosts add up, modulo 2^128, to the
            same number however the state is cut.
        owners: who computed each microbatch, by the name of the sum.
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
    """One host goes on from a state that it did not compute in this generation; fields as in `Committed`.

    Attributes:
        steps: so many are in the state.
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
    """All whole lines of these files, in the order of each. A torn last line (its writer was killed) is left out."""
    lines: list[LedgerEntry] = []
    for path in sorted(paths):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(msgspec.DecodeError):  # torn by a full disk: it vouches for nothing
                lines.append(ENTRY_DECODER.decode(line))
    return lines
