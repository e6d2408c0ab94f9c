"""Invariants of what was committed, read from the ledgers of all workers. Pure.

A step may be committed by several hosts, and again in a later generation if those that had committed it died or the
job went back to a snapshot; it must be the same step each time.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from resilient_jax.chaos.violations import Invariant, Violation
from resilient_jax.protocol.ledger import Begun, Committed, Line, Restored

SUM_MODULUS = 2**64
HALF = 16
"""Hexadecimal digits of each of the two lanes of a sum."""
SHOWN = 5
"""Of many violations of one kind: more would bury the story."""


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    """Of the whole state after a step. `sha256` is empty where no host had the whole."""

    sha256: str
    sum: str

    def equals(self, other: "Digest") -> bool:
        """By SHA-256 where both have it."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return self.sum == other.sum


def add_sums(sums: Iterable[str]) -> str:
    """The digest of a state from those of its parts."""
    lanes = [0, 0]
    for text in sums:
        for lane, digits in enumerate((text[:HALF], text[HALF:])):
            lanes[lane] = (lanes[lane] + int(digits, 16)) % SUM_MODULUS
    return "".join(f"{lane:016x}" for lane in lanes)


def digests_of(lines: Iterable[Committed | Restored]) -> Iterator[tuple[int, Digest, str]]:
    """Step, digest of the whole state after it, and who says so. Parts of which some are missing say nothing."""
    parts: dict[tuple[int, int], list[Committed | Restored]] = collections.defaultdict(list)
    for line in lines:
        step = line.step if isinstance(line, Committed) else line.steps - 1
        if line.sha256:
            yield step, Digest(line.sha256, line.sum), f"{line.host} in generation {line.generation}"
        else:
            parts[line.generation, step].append(line)
    for (generation, step), found in parts.items():
        by_host = {line.host: line for line in found}
        if len(by_host) == found[0].hosts:
            total = add_sums(line.sum for line in by_host.values())
            yield step, Digest("", total), f"all {len(by_host)} hosts of generation {generation}"


def read_reference(lines: Iterable[Line]) -> dict[int, Digest]:
    """The digest after each step of a run that nobody disturbed."""
    return {step: digest for step, digest, _ in digests_of([x for x in lines if isinstance(x, Committed)])}


def check_commits(lines: Sequence[Line], reference: Mapping[int, Digest]) -> list[Violation]:
    """All that is wrong.

    Args:
        lines: of all workers so far, each process's in its order.
        reference: digests of the undisturbed run; of steps that it lacks the hosts must agree among themselves.
    """
    committed = [line for line in lines if isinstance(line, Committed)]
    restored = [line for line in lines if isinstance(line, Restored)]
    return [
        *_other_bits(committed, restored, reference),
        *_out_of_order(committed),
        *_wrong_microbatches(committed, [line for line in lines if isinstance(line, Begun)]),
        *_late_commits(committed),
    ]


def check_complete(
    lines: Sequence[Line], steps: int | None, reference: Mapping[int, Digest]
) -> list[Violation]:
    """What is missing when the job is done.

    Args:
        lines: of all workers.
        steps: that were to be trained; None: up to the newest.
        reference: digests of the undisturbed run.
    """
    done = {line.step for line in lines if isinstance(line, Committed)}
    total = steps if steps is not None else max(done, default=-1) + 1
    found = []
    if missing := sorted(set(range(total)) - done):
        found.append(
            Violation(invariant=Invariant.STEPS, found=f"steps {missing[:SHOWN]} were never committed")
        )
    if extra := sorted(step for step in done if step >= total):
        found.append(Violation(invariant=Invariant.STEPS, found=f"steps {extra[:SHOWN]} are beyond the last"))
    if unknown := sorted(done - reference.keys()):
        text = f"steps {unknown[:SHOWN]} have no undisturbed counterpart"
        found.append(Violation(invariant=Invariant.BITS, found=text))
    return found


def _other_bits(
    committed: list[Committed], restored: list[Restored], reference: Mapping[int, Digest]
) -> Iterator[Violation]:
    expected = dict(reference)
    shown: collections.Counter[Invariant] = collections.Counter()
    for invariant, lines in ((Invariant.BITS, committed), (Invariant.RESTORED, restored)):
        for step, digest, who in digests_of(lines):
            if step < 0:
                continue  # the initial state
            first = expected.setdefault(step, digest)
            if not digest.equals(first):
                shown[invariant] += 1
                if shown[invariant] <= SHOWN:
                    text = f"step {step}: {digest.sha256 or digest.sum} on {who}, expected {first.sha256 or first.sum}"
                    yield Violation(invariant=invariant, found=text)


def _out_of_order(committed: list[Committed]) -> Iterator[Violation]:
    newest: dict[tuple[str, int, int], int] = {}
    for line in committed:
        key = line.host, line.process, line.generation
        before = newest.get(key)
        if before is not None and line.step != before + 1:
            text = f"process {line.process} of {line.host} committed step {line.step} after {before} in generation "
            yield Violation(invariant=Invariant.STEPS, found=f"{text}{line.generation}")
        newest[key] = line.step


def _wrong_microbatches(committed: list[Committed], begun: list[Begun]) -> Iterator[Violation]:
    computed = {(line.host, line.step, line.index) for line in begun}
    owners: dict[tuple[int, int], dict[str, tuple[str, ...]]] = {}
    counts: dict[str, int] = {}
    for line in committed:
        first = owners.setdefault((line.generation, line.step), line.owners)
        where = f"step {line.step} in generation {line.generation}"
        if first != line.owners:
            text = f"{where}: {line.host} says {line.owners}, another host {first}"
            yield Violation(invariant=Invariant.MICROBATCHES, found=text)
        for name, hosts in line.owners.items():
            if counts.setdefault(name, len(hosts)) != len(hosts):
                text = f"{where}: {len(hosts)} microbatches in {name}, expected {counts[name]}"
                yield Violation(invariant=Invariant.MICROBATCHES, found=text)
            for index, host in enumerate(hosts):
                if (host, line.step, index) not in computed:
                    text = f"{where}: {host} is said to have computed microbatch {index}, and never began it"
                    yield Violation(invariant=Invariant.MICROBATCHES, found=text)


def _late_commits(committed: list[Committed]) -> Iterator[Violation]:
    """A worker that wakes up late may finish the step that it was in, and no other.

    The step in flight of a generation that has ended is at most the first that a later one commits.
    """
    firsts: dict[int, tuple[float, int]] = {}
    for line in sorted(committed, key=lambda line: line.monotonic_s):
        for generation, (when_s, step) in firsts.items():
            if generation > line.generation and line.step > step:
                yield Violation(
                    invariant=Invariant.FENCED,
                    found=f"{line.host} committed step {line.step} in generation {line.generation} "
                    f"{line.monotonic_s - when_s:.2f} s after generation {generation} had committed step {step}",
                )
        firsts.setdefault(line.generation, (line.monotonic_s, line.step))
