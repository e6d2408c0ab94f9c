"""The exact sums of each block's gradients over the microbatches of a step, whichever hosts compute them.

1. A host adds each addend to its part of the piece's sum, in integers (`step.running_total`), so no order matters.
2. Large arrays need limits, which follow from microbatch 0. The host that computes it sends them to the others; until
   they have come, addends are kept as they are. After a failure those stay that any living host knows.
3. When all tasks are done, each host sends its parts to the hosts that need them, and adds theirs to its own.

The sums depend on the microbatches and on nothing else: no cut, route, order or host. They go from host memory to host
memory, each part to every holder, which for many holders of a block is more traffic than a reduction needs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError, ResilientJaxError
from resilient_jax.ids import HostName
from resilient_jax.pipeline.step_mail import StepMail
from resilient_jax.pipeline.step_sums import PieceSum, StepSums
from resilient_jax.pipeline.sum_pieces import SumLayout, SumPiece
from resilient_jax.sharding.stage_sharding import StageSharding, make_single_device_stage
from resilient_jax.step.assignment import AccumulationSpec, Reduction
from resilient_jax.step.contributions import FIRST_MICROBATCH, Contribution, Contributions
from resilient_jax.step.fixed_point_sum import choose_limits, find_misfits
from resilient_jax.step.running_total import (
    NO_LIMITS,
    add_to_total,
    find_exponents,
    list_formats,
    merge_totals,
    read_total,
    start_total,
)
from resilient_jax.transport.mail_protocol import MailKind

Limits = tuple[tuple[int, tuple[int, ...]], ...]
"""Numbers of pieces, with the limits of each."""
RUNNING_PART = -1
"""The number of the part that is a running total; a part that waits for limits has that of its microbatch."""


class BlockSums:
    """What one host has of the sums of a step, and how it gets the rest.

    Args:
        host: this one.
        pieces: of the model.
        num_microbatches: of a step.
        reduction: exact, or exact_wide.

    Attributes:
        sharding: over this host's devices, of the sums. By default all are on the first one.
    """

    def __init__(
        self,
        host: HostName,
        pieces: Sequence[SumPiece],
        num_microbatches: int,
        reduction: Reduction = "exact",
        sharding: StageSharding | None = None,
    ) -> None:
        if reduction == "fast":
            raise CallerError(
                'reduction: found "fast", expected "exact" or "exact_wide": parts of a sum are added in no fixed order'
            )
        self.sharding = sharding or make_single_device_stage()
        self._host = host
        self._pieces = pieces
        self._num_microbatches = num_microbatches
        self._reduction: Reduction = reduction
        self._parts: list[Contributions] = []
        self._announce: Callable[[SumPiece, np.ndarray], None] = lambda piece, limits: None
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Drop the sums of the step before."""
        self._parts = [Contributions(self._make_spec(piece, step)) for piece in self._pieces]
        for piece, part in zip(self._pieces, self._parts, strict=True):
            if not list_formats(part.spec, piece.shapes):
                part.limits = NO_LIMITS

    def move_to_host(self) -> bool:
        """Copy all totals to host memory until `place`; return whether all could be: one that failed is of no use."""
        for part in self._parts:
            number = len(part.parts)
            part.move_to_host()
            if len(part.parts) < number:
                return False
        return True

    def place(self) -> None:
        """Have all totals on the devices of this host again."""
        for piece, part in zip(self._pieces, self._parts, strict=True):
            for number, found in part.parts.items():
                part.parts[number] = dataclasses.replace(found, total=self._place(piece, found.total))

    @property
    def known_limits(self) -> Limits:
        """The limits that this host knows, by the number of the piece; without those of pieces that need none."""
        return tuple(
            (piece.number, tuple(part.limits.tolist()))
            for piece, part in zip(self._pieces, self._parts, strict=True)
            if part.limits is not None and part.limits.size
        )

    def take_limits(self, known: Limits) -> None:
        """Take limits that another host knows, where this one knows none.

        If microbatch 0 is computed again, by a host with other axes, its gradients may differ in the last bits: from
        these other limits could follow, and totals of different limits cannot be added.
        """
        for number, limits in known:
            part = self._parts[number]
            if part.limits is None:
                self._start(part, np.array(limits, np.int32))

    def begin_generation(self, mail: StepMail, layout: SumLayout) -> None:
        """Send limits by this mail from now on, as soon as they are known."""

        def announce(piece: SumPiece, limits: np.ndarray) -> None:
            key = mail.make_key(MailKind.LIMITS, FIRST_MICROBATCH, piece.number)
            needing = layout.find_receivers(piece).union(layout.find_first_microbatches(piece.block))
            for host in sorted(needing - {self._host}):
                # A host that is lost must not break off what is being added: the rest of the block would be missing.
                with contextlib.suppress(ResilientJaxError):
                    mail.send(host, key, mail.pack([limits]))

        self._announce = announce

    def has(self, block: int, microbatch: int) -> bool:
        """Return whether the gradients of a block for a microbatch are in the sums of this host."""
        return all(
            _has_microbatch(part, microbatch)
            for piece, part in zip(self._pieces, self._parts, strict=True)
            if piece.block == block
        )

    def add(
        self, block: int, microbatch: int, gradients: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Add the gradients and results of a block for a microbatch, where they are not in the sums yet."""
        for piece, part in zip(self._pieces, self._parts, strict=True):
            if piece.block == block and not _has_microbatch(part, microbatch):
                self._add(piece, part, microbatch, piece.select(gradients, results))

    def rehearse(self, block: int, gradients: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Run the programs of a block's sums, as for two microbatches and two hosts, and keep nothing."""
        for microbatch in range(FIRST_MICROBATCH, FIRST_MICROBATCH + 2):
            self.add(block, microbatch, gradients, results)
        for piece, part in zip(self._pieces, self._parts, strict=True):
            if piece.block == block:
                assert part.limits is not None, "those of the first microbatch are known"
                total = part.parts[RUNNING_PART].total
                received = self._place(piece, jax.tree.map(np.asarray, total))
                jax.block_until_ready(_read(merge_totals([total, received]), part.limits))
        self.begin_step(0)

    def finish(self, mail: StepMail, layout: SumLayout) -> StepSums:
        """Return the sums that this host needs, when all hosts have sent their parts.

        Raises:
            PeerUnreachable: a host is lost, or late.
        """
        wanted = [piece for piece in self._pieces if self._host in layout.find_receivers(piece)]
        for piece in self._pieces:
            # Also of blocks that this host has run and does not hold any more.
            if piece in wanted or self._host in layout.find_first_microbatches(piece.block):
                self._send_part(piece, mail, layout)
        return StepSums({piece.number: self._collect(piece, mail, layout) for piece in wanted})

    def _add(self, piece: SumPiece, part: Contributions, microbatch: int, addend: tuple[Any, ...]) -> None:
        if part.limits is None:
            waiting = Contribution(
                total=addend,
                microbatches=frozenset({microbatch}),
                exponents=(jax.block_until_ready(find_exponents(part.spec, addend)),),
                is_started=False,
            )
            part.parts[microbatch] = waiting
            first = part.find_first_exponents()
            if first is not None:
                limits = choose_limits(first, list_formats(part.spec, piece.shapes), self._num_microbatches)
                self._start(part, limits)
                self._announce(piece, limits)
            return
        running = part.parts.get(RUNNING_PART)
        if running is None:
            # Awaited: two programs with collectives on the same devices must not be in flight together.
            exponents = jax.block_until_ready(find_exponents(part.spec, addend))
            total = start_total(part.spec, addend, part.limits)
            running = Contribution(total=total, microbatches=frozenset())
        else:
            total, exponents = add_to_total(running.total, addend, part.limits, donate=True)
        part.parts[RUNNING_PART] = Contribution(
            total=jax.block_until_ready(total),
            microbatches=running.microbatches | {microbatch},
            exponents=(*running.exponents, exponents),
        )

    def _start(self, part: Contributions, limits: np.ndarray) -> None:
        """Make one running total of what has waited for the limits."""
        part.start_totals(limits)
        found = list(part.parts.values())
        if found:
            part.parts.clear()
            part.parts[RUNNING_PART] = Contribution(
                total=merge_totals([one.total for one in found]),
                microbatches=frozenset().union(*(one.microbatches for one in found)),
                exponents=tuple(exponent for one in found for exponent in one.exponents),
            )

    def _send_part(self, piece: SumPiece, mail: StepMail, layout: SumLayout) -> None:
        part, firsts = self._parts[piece.number], layout.find_first_microbatches(piece.block)
        if part.limits is None:
            key = mail.make_key(MailKind.LIMITS, FIRST_MICROBATCH, piece.number)
            sender = next(host for host, first in firsts.items() if first == FIRST_MICROBATCH)
            shape = jax.ShapeDtypeStruct((len(list_formats(part.spec, piece.shapes)),), np.int32)
            self._start(part, np.array(mail.take_arrays(sender, key, [shape])[0]))
        if self._host in firsts:
            total = part.parts[RUNNING_PART].total
            data = mail.pack([*jax.tree.leaves(total), part.count_shares()])
            key = mail.make_key(MailKind.TOTAL, firsts[self._host], piece.number)
            for host in sorted(layout.find_receivers(piece) - {self._host}):
                mail.send(host, key, data)

    def _collect(self, piece: SumPiece, mail: StepMail, layout: SumLayout) -> PieceSum:
        part, totals, shares = self._parts[piece.number], [], []
        like = piece.describe_total(part.spec)
        assert part.limits is not None
        shapes = [*jax.tree.leaves(like), jax.ShapeDtypeStruct(part.limits.shape, np.int32)]
        for host, first in layout.find_first_microbatches(piece.block).items():
            if host == self._host:
                totals.append(part.parts[RUNNING_PART].total)
                shares.append(part.count_shares())
                continue
            key = mail.make_key(MailKind.TOTAL, first, piece.number)
            *leaves, share = mail.take_arrays(host, key, shapes)
            received = jax.tree.unflatten(jax.tree.structure(like), leaves)
            totals.append(self._place(piece, received))
            shares.append(share)
        misfits = find_misfits(np.sum(np.array(shares, np.int64), axis=0))
        # Sharded alike on all holders, whoever has computed what: a norm is added up in the order of shards.
        values = self._place(piece, _read(merge_totals(totals), part.limits))
        return PieceSum(piece, values, bool(misfits.any()))

    def _place(self, piece: SumPiece, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return sums, or their totals, on this host's devices, sharded as the weights are that they are of."""
        specs = [self.sharding.find_weight_spec(name) for name in piece.names]
        specs += [P()] * (len(piece.changed_names) + len(piece.result_names))
        return tuple(
            jax.device_put(value, self.sharding.place(spec)) for value, spec in zip(sums, specs, strict=True)
        )

    def _make_spec(self, piece: SumPiece, step: int) -> AccumulationSpec:
        return AccumulationSpec(
            name=f"block {piece.block}",
            step=step,
            num_microbatches=self._num_microbatches,
            reduction=self._reduction,
        )


def _has_microbatch(part: Contributions, microbatch: int) -> bool:
    return any(microbatch in contribution.microbatches for contribution in part.parts.values())


@jax.jit
def _read(total: Any, limits: jax.Array) -> Any:  # noqa: ANN401 - a tree of exact sums
    return read_total(total, limits)
