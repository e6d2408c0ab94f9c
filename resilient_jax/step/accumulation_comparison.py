"""Compares what the hosts are about to accumulate, before any collective whose shape depends on it.

gloo takes no notice of what its peers send: hosts with different models would wait for each other, or add up unlike
things. So a generation's first accumulation of each name begins with digests of fixed size, and, where these differ,
with the descriptions of two hosts. Compared are what is added up, and the programs that compute it and that use it, as
far as they are known (see `microbatch_program`): a host of which a program is not known differs from none.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from resilient_jax.host_exchange import MAX_INTEGER_BYTES, HostExchange
from resilient_jax.program_analysis.program_digest import PROGRAM, ProgramDescription
from resilient_jax.state.state_digest import DIGEST_WORDS, NO_DIGEST, find_differing
from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape
from resilient_jax.step.microbatch_program import COMPARED_PROGRAMS

TEXT_BYTES: Final = 2**16
"""Length of a description that is sent; a longer one is cut off."""
MAX_NAMED: Final = 3
"""Differences that a message names; it gives the number of all others."""


class AccumulationDigests(msgspec.Struct, frozen=True, array_like=True):
    """What a host tells the others of its accumulation, and of its programs by `COMPARED_PROGRAMS`: digests of each."""

    accumulation: tuple[int, ...]
    programs: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """Hosts that accumulate something else than the others.

    Attributes:
        hosts: indexes of these hosts; all hosts if there is no majority.
        has_majority: whether most hosts agree.
        why: what differs, with both values.
    """

    hosts: tuple[int, ...]
    has_majority: bool
    why: str


def describe_accumulation(spec: AccumulationSpec, replica_shape: ReplicaShape, zeros: Any) -> list[str]:  # noqa: ANN401
    """Return lines that are equal on all hosts if they accumulate the same: `name: value`."""
    leaves = jax.tree.leaves_with_path(zeros)
    return [
        f"num_microbatches: {spec.num_microbatches}",
        f"reduction: {spec.reduction}",
        f"replicas: {replica_shape}",
        f"balance_by_speed: {spec.balance_by_speed}",
        f"number of leaves: {len(leaves)}",
        *(f"leaf {jax.tree_util.keystr(path)}: {_describe_leaf(leaf)}" for path, leaf in leaves),
        f"tree: {jax.tree.structure(zeros)}",
    ]


def find_differing_hosts(
    lines: list[str], programs: Mapping[str, ProgramDescription], exchange: HostExchange
) -> Differing | None:
    """Return which hosts accumulate something else; None: none does. For all hosts at once.

    Args:
        lines: what this host accumulates, as `describe_accumulation` says it.
        programs: what is known of this host's programs, by `COMPARED_PROGRAMS`; unknown ones are not compared.
        exchange: what all hosts take part in.
    """
    own = AccumulationDigests(
        accumulation=_read_digest(hashlib.sha256("\n".join(lines).encode()).digest()),
        programs=tuple(
            _read_digest(programs[name].digest) if name in programs else NO_DIGEST
            for name in COMPARED_PROGRAMS
        ),
    )
    told = exchange.gather(own)
    compare = functools.partial(_compare_descriptions, exchange=exchange)
    # The accumulation first: hosts that add up unlike things have unlike programs, too, which would explain less.
    differing = compare(lines, [digests.accumulation for digests in told])
    if differing is not None:
        return differing
    for number, name in enumerate(COMPARED_PROGRAMS):
        digests = [digests.programs[number] for digests in told]
        differing = compare(list(programs[name].lines) if name in programs else [], digests)
        if differing is not None:
            return dataclasses.replace(differing, why=f"of the program of {name}, {differing.why}")
    return None


def _read_digest(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, np.int32, DIGEST_WORDS).tolist())


def _compare_descriptions(
    lines: list[str], digests: list[tuple[int, ...]], *, exchange: HostExchange
) -> Differing | None:
    differing, has_majority = find_differing(digests)
    if not differing:
        return None
    compared = [host for host, digest in enumerate(digests) if digest != NO_DIGEST]
    # All hosts know the same table, so they agree on whose descriptions they read.
    expected = next((host for host in compared if host not in differing), differing[0])
    odd = next(host for host in differing if digests[host] != digests[expected])
    text = "\n".join(lines).encode()[:TEXT_BYTES]
    # Two texts, however many hosts differ: an exchange has room for every speaker on every host.
    texts = exchange.gather(text, speakers=(odd, expected), room_bytes=TEXT_BYTES + MAX_INTEGER_BYTES)
    odd_lines, expected_lines = (text.decode(errors="replace").splitlines() for text in texts)
    return Differing(
        hosts=tuple(differing),
        has_majority=has_majority,
        why=_describe_differences(odd_lines, expected_lines),
    )


def _describe_leaf(leaf: Any) -> str:  # noqa: ANN401 - an array, or a number
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _describe_differences(odd: list[str], expected: list[str]) -> str:
    ours, theirs = (dict(line.split(": ", 1) for line in lines if ": " in line) for lines in (odd, expected))
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    # Of a tree whose leaves differ the structure says nothing more, nor does the digest of a program.
    named = [name for name in names if name not in ("tree", PROGRAM)] or names
    # What only one of them has says most.
    named.sort(key=lambda name: name in ours and name in theirs)
    text = "; ".join(
        f"{name}: found {ours.get(name, 'none')}, expected {theirs.get(name, 'none')}"
        for name in named[:MAX_NAMED]
    )
    return text + (f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else "")
