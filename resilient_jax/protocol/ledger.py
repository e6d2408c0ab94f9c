"""The ledger: what was committed, step by step, as each worker saw it, to check a job's guarantees from outside.

A controller names a directory in the environment; each worker then appends to a file of its own there. Without the
variable nothing is computed or written. Entries are written by `worker.ledger` and read by `tests/chaos`.
"""

import msgspec

LEDGER_VARIABLE = "RESILIENT_JAX_LEDGER"


class StepEntry(msgspec.Struct, frozen=True, tag="committed", kw_only=True):
    """One host has committed a step.

    Attributes:
        step: index of the step that is done.
        num_hosts: hosts that commit the step in this generation.
        replica: JAX's processes whose hosts have the state between them; empty: all hosts of the generation.
        state_sha256: SHA-256 of the complete state after the step; empty where the host has only a part of it.
        additive_digest: digest of this host's part of the state, in 32 hexadecimal digits: those of all hosts add up,
            modulo 2^128, to the same number however the state is sharded; of a replica of several hosts, its hosts'.
        owners: hosts that computed each microbatch, by the name of the reduction.
    """

    host: str
    pid: int
    generation: int
    step: int
    num_hosts: int
    replica: tuple[int, ...]
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
    replica: tuple[int, ...]
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

ENTRY_ENCODER = msgspec.json.Encoder()
