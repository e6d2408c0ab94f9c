"""The invariants of commits, read from the ledgers of all workers. Pure.

Several hosts may commit a step, and a later generation may commit the step again if the hosts that had committed the
step died or the job resumed from a snapshot; the result must be the same each time.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from resilient_jax.protocol.ledger import LedgerEntry, MicrobatchEntry, RestoreEntry, StepEntry
from tests.chaos.invariants import Invariant, Violation

SUM_MODULUS = 2**64
LANE_DIGITS = 16
"""Hexadecimal digits of each of the two lanes of a sum."""
MAX_SHOWN = 5
"""Violations of one kind in a report: more would hide the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class StateDigest:
    """The digest of the complete state after a step; `sha256` is empty if no host had the complete state."""

    sha256: str
    sum: str

    def matches(self, other: "StateDigest") -> bool:
        """Return whether the states are equal: by SHA-256 if both digests have one, else by the sum."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return self.sum == other.sum


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """A step of the run without faults.

    Attributes:
        digest: the digest of the complete state after the step.
        microbatches: the number of microbatches of each accumulation of the step, by its name.
    """

    digest: StateDigest
    microbatches: Mapping[str, int]


def combine_sums(sums: Iterable[str]) -> str:
    """Return the additive digest of a state from those of its parts."""
    lanes = [0, 0]
    for text in sums:
        for lane, digits in enumerate((text[:LANE_DIGITS], text[LANE_DIGITS:])):
            lanes[lane] = (lanes[lane] + int(digits, 16)) % SUM_MODULUS
    return "".join(f"{lane:016x}" for lane in lanes)


def iterate_digests(lines: Iterable[StepEntry | RestoreEntry]) -> Iterator[tuple[int, StateDigest, str]]:
    """Yield step, digest of the complete state after the step, and source, without incomplete sets of parts."""
    parts: dict[tuple[int, int, tuple[int, ...]], list[StepEntry | RestoreEntry]] = collections.defaultdict(
        list
    )
    for line in lines:
        # The state after n steps is the one that step n - 1 committed.
        step = line.step if isinstance(line, StepEntry) else line.num_steps - 1
        if line.state_sha256:
            yield (
                step,
                StateDigest(line.state_sha256, line.additive_digest),
                f"{line.host} in generation {line.generation}",
            )
        else:
            parts[line.generation, step, line.replica].append(line)
    for (generation, step, replica), found in parts.items():
        by_host = {line.host: line for line in found}
        if len(by_host) == (len(replica) or found[0].num_hosts):
            total = combine_sums(line.additive_digest for line in by_host.values())
            yield step, StateDigest("", total), f"{', '.join(sorted(by_host))} in generation {generation}"


def read_reference(lines: Iterable[LedgerEntry]) -> dict[int, ReferenceStep]:
    """Return the steps of a run without faults, by their index."""
    committed = [line for line in lines if isinstance(line, StepEntry)]
    microbatches = {line.step: _microbatches_of(line) for line in committed}
    return {
        step: ReferenceStep(digest=digest, microbatches=microbatches[step])
        for step, digest, _ in iterate_digests(committed)
    }


def check_commits(lines: Sequence[LedgerEntry], reference: Mapping[int, ReferenceStep]) -> list[Violation]:
    """Return all violations in the ledgers so far.

    Args:
        lines: the entries of all workers, those of one process in their order.
        reference: the run without faults; on steps that the run lacks the hosts must agree with each other.
    """
    committed = [line for line in lines if isinstance(line, StepEntry)]
    restored = [line for line in lines if isinstance(line, RestoreEntry)]
    return [
        *_other_bits(committed, restored, reference),
        *_out_of_order(committed),
        *_wrong_microbatches(
            committed, [line for line in lines if isinstance(line, MicrobatchEntry)], reference
        ),
        *_late_commits(committed),
    ]


def check_completeness(
    lines: Sequence[LedgerEntry], steps: int | None, reference: Mapping[int, ReferenceStep] | None
) -> list[Violation]:
    """Return the violations of a job that has ended: missing steps, extra steps, and steps that were never compared.

    Args:
        lines: the entries of all workers.
        steps: the number of steps to train; None: the job failed, in the step after the newest or in the newest.
        reference: the run without faults; None: there is none.
    """
    committed = [line for line in lines if isinstance(line, StepEntry)]
    restored = [line for line in lines if isinstance(line, RestoreEntry)]
    done = {line.step for line in committed}
    # A step in which a host died is repeated; or all hosts restore the step, which gives its digest as well.
    compared = {step for found in (committed, restored) for step, _, _ in iterate_digests(found)}
    total = steps if steps is not None else max(done, default=-1) + 1
    found = []
    if missing := sorted(set(range(total)) - done):
        found.append(
            Violation(
                invariant=Invariant.STEPS, description=f"steps {missing[:MAX_SHOWN]} were never committed"
            )
        )
    if extra := sorted(step for step in done if step >= total):
        found.append(
            Violation(invariant=Invariant.STEPS, description=f"steps {extra[:MAX_SHOWN]} are beyond the last")
        )
    if reference is not None and (unknown := sorted(done - reference.keys())):
        text = f"steps {unknown[:MAX_SHOWN]} have no counterpart in the run without faults"
        found.append(Violation(invariant=Invariant.BITS, description=text))
    in_flight = {max(done)} if done and steps is None else set()
    if torn := sorted(done - compared - in_flight):
        text = f"steps {torn[:MAX_SHOWN]} were never compared, expected each committed by all hosts of some generation"
        found.append(Violation(invariant=Invariant.BITS, description=text))
    return found


def _other_bits(
    committed: list[StepEntry], restored: list[RestoreEntry], reference: Mapping[int, ReferenceStep]
) -> Iterator[Violation]:
    expected = {step: known.digest for step, known in reference.items()}
    shown: collections.Counter[Invariant] = collections.Counter()
    for invariant, lines in ((Invariant.BITS, committed), (Invariant.RESTORED_BYTES, restored)):
        for step, digest, who in iterate_digests(lines):
            if step < 0:
                continue  # the initial state, which no step has
            first = expected.setdefault(step, digest)
            if not digest.matches(first):
                shown[invariant] += 1
                if shown[invariant] <= MAX_SHOWN:
                    text = f"step {step}: {digest.sha256 or digest.sum} on {who}, expected {first.sha256 or first.sum}"
                    yield Violation(invariant=invariant, description=text)


def _out_of_order(committed: list[StepEntry]) -> Iterator[Violation]:
    newest: dict[tuple[str, int, int], int] = {}
    for line in committed:
        key = line.host, line.pid, line.generation
        before = newest.get(key)
        if before is not None and line.step != before + 1:
            text = (
                f"process {line.pid} of {line.host} committed step {line.step} after {before} in generation "
            )
            yield Violation(invariant=Invariant.STEPS, description=f"{text}{line.generation}")
        newest[key] = line.step


def _wrong_microbatches(
    committed: list[StepEntry], begun: list[MicrobatchEntry], reference: Mapping[int, ReferenceStep]
) -> Iterator[Violation]:
    computed = {(line.host, line.step, line.index) for line in begun}
    owners: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {}
    # By step: only few steps have the accumulation of an evaluation.
    expected = {step: known.microbatches for step, known in reference.items()}
    for line in committed:
        first = owners.setdefault((line.generation, line.step), line.owners)
        where = f"step {line.step} in generation {line.generation}"
        if first != line.owners:
            text = f"{where}: {line.host} reports {line.owners}, another host {first}"
            yield Violation(invariant=Invariant.MICROBATCHES, description=text)
        counts = _microbatches_of(line)
        if counts != expected.setdefault(line.step, counts):
            text = f"{where}: {line.host} reports the microbatches {counts}, expected {expected[line.step]}"
            yield Violation(invariant=Invariant.MICROBATCHES, description=text)
        for hosts in line.owners.values():
            for index, host in enumerate(hosts):
                if (host, line.step, index) not in computed:
                    text = f"{where}: {host} is reported as owner of microbatch {index}, and never began it"
                    yield Violation(invariant=Invariant.MICROBATCHES, description=text)


def _microbatches_of(line: StepEntry) -> dict[str, int]:
    return {name: len(hosts) for name, hosts in line.owners.items()}


def _late_commits(committed: list[StepEntry]) -> Iterator[Violation]:
    """Yield commits of workers that woke up late and did more than finish their step in flight.

    The step in flight of a generation that has ended is at most the first that a later one commits.
    """
    firsts: dict[int, tuple[float, int]] = {}
    for line in sorted(committed, key=lambda line: line.monotonic_s):
        for generation, (when_s, step) in firsts.items():
            if generation > line.generation and line.step > step:
                yield Violation(
                    invariant=Invariant.FENCING,
                    description=f"{line.host} committed step {line.step} in generation {line.generation} "
                    f"{line.monotonic_s - when_s:.2f} s after generation {generation} had committed step {step}",
                )
        firsts.setdefault(line.generation, (line.monotonic_s, line.step))
