"""The exact sums of each block's gradients over the microbatches of a step, whichever hosts compute them.

1. A host adds each addend to its contribution to the piece's sum, in integers (`step.running_total`), so no order
   matters. Sums are in bins: of limits, which follow from a microbatch, hosts would have to agree, and to make a sum
   again that did not fit would be to run all tasks again.
2. When all tasks are done, each host sends its contributions to the hosts that need them, and adds theirs to its own.

The sums depend on the microbatches and on nothing else: no cut, route, order or host. They go from host memory to host
memory, each contribution to every holder, which for many holders of a block is more traffic than a reduction needs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError
from resilient_jax.host_exchange.step_mail import TOTAL_MAIL, StepMail
from resilient_jax.ids import HostName
from resilient_jax.pipeline.sum_pieces import PieceValues, StepSums, SumLayout, SumPiece
from resilient_jax.sharding.stage_sharding import StageSharding, make_single_device_stage
from resilient_jax.step.assignment import AccumulationSpec, Reduction
from resilient_jax.step.contributions import FIRST_MICROBATCH, Contributions
from resilient_jax.step.running_total import NO_LIMITS, describe_totals, merge_totals, read_sums

RUNNING_TOTAL = -1
"""The number of the running total among the parts of `Contributions`: it is the only one."""


class BlockSums:
    """What one host has of the sums of a step, and how it gets the rest.

    Args:
        pieces: all pieces of the model, by number.
        num_microbatches: microbatches of one step, over all hosts.
        reduction: exact or exact_wide, which are the same here.

    Attributes:
        sharding: layout of the sums over this host's devices. By default all are on the first one.
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
                'reduction: found "fast", expected "exact" or "exact_wide": contributions are added in no fixed order'
            )
        self.sharding = sharding or make_single_device_stage()
        self._host = host
        self._pieces = pieces
        self._num_microbatches = num_microbatches
        self._contributions: list[Contributions] = []
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Drop the sums of the step before."""
        self._contributions = [
            Contributions(self._make_spec(piece, step), limits=NO_LIMITS) for piece in self._pieces
        ]

    def move_to_host(self) -> bool:
        """Copy all totals to host memory until `place`; return whether all could be: one that failed is of no use."""
        for contributions in self._contributions:
            number = len(contributions.parts)
            contributions.move_to_host()
            if len(contributions.parts) < number:
                return False
        return True

    def place(self) -> None:
        """Have all totals on the devices of this host again."""
        for piece, contributions in zip(self._pieces, self._contributions, strict=True):
            for number, running in contributions.parts.items():
                total = self._place(piece, running.total)
                contributions.parts[number] = dataclasses.replace(running, total=total)

    def has(self, block: int, microbatch: int) -> bool:
        """Return whether the gradients of a block for a microbatch are in the sums of this host."""
        # All pieces of the block: a failure between two of them has left the rest without this microbatch.
        return all(
            contributions.has(microbatch)
            for piece, contributions in zip(self._pieces, self._contributions, strict=True)
            if piece.block == block
        )

    def add(
        self, block: int, microbatch: int, gradients: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Add the gradients and results of a block for a microbatch, where they are not in the sums yet."""
        for piece, contributions in zip(self._pieces, self._contributions, strict=True):
            if piece.block == block and not contributions.has(microbatch):
                contributions.add(RUNNING_TOTAL, microbatch, piece.select(gradients, results))
                # Awaited: two programs with collectives on the same devices must not be in flight together.
                jax.block_until_ready(contributions.parts[RUNNING_TOTAL].total)

    def rehearse(self, block: int, gradients: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Run the programs of a block's sums, as for two microbatches and two hosts, and keep nothing."""
        for microbatch in range(FIRST_MICROBATCH, FIRST_MICROBATCH + 2):
            self.add(block, microbatch, gradients, results)
        for piece, contributions in zip(self._pieces, self._contributions, strict=True):
            if piece.block == block:
                total = contributions.parts[RUNNING_TOTAL].total
                received = self._place(piece, jax.tree.map(np.asarray, total))
                jax.block_until_ready(read_sums(merge_totals([total, received]), NO_LIMITS))
        self.begin_step(0)

    def finish(self, mail: StepMail, layout: SumLayout) -> StepSums:
        """Return the sums that this host needs, when all hosts have sent their contributions.

        Raises:
            PeerUnreachable: a host is lost, or late.
        """
        # All are sent before any is waited for, and none is dropped: a step that is resumed sends them again, to the
        # hosts that need them then.
        wanted = [piece for piece in self._pieces if self._host in layout.list_receivers(piece)]
        for piece in self._pieces:
            # Also of blocks that this host has run and does not hold any more.
            if piece in wanted or self._host in layout.list_first_microbatches(piece.block):
                self._send_contribution(piece, mail, layout)
        return StepSums([(piece, self._collect(piece, mail, layout)) for piece in wanted])

    def _send_contribution(self, piece: SumPiece, mail: StepMail, layout: SumLayout) -> None:
        firsts = layout.list_first_microbatches(piece.block)
        if self._host in firsts:
            # A key has no sender: the first microbatch, which no other contribution has, says which one this is.
            data = mail.pack(jax.tree.leaves(self._contributions[piece.number].parts[RUNNING_TOTAL].total))
            key = mail.make_key(TOTAL_MAIL, firsts[self._host], piece.number)
            for host in sorted(layout.list_receivers(piece) - {self._host}):
                mail.send(host, key, data)

    def _collect(self, piece: SumPiece, mail: StepMail, layout: SumLayout) -> PieceValues:
        contributions, totals = self._contributions[piece.number], []
        like = describe_totals(contributions.spec, piece.shapes)
        # By the routes: every host that has run the block has contributed, whether it holds the block or not any more.
        for host, first in layout.list_first_microbatches(piece.block).items():
            if host == self._host:
                totals.append(contributions.parts[RUNNING_TOTAL].total)
                continue
            key = mail.make_key(TOTAL_MAIL, first, piece.number)
            received = jax.tree.unflatten(
                jax.tree.structure(like), mail.take_arrays(host, key, jax.tree.leaves(like))
            )
            totals.append(self._place(piece, received))
        # Sharded alike on all holders, whoever has computed what: a norm is added up in the order of shards.
        return piece.name(self._place(piece, read_sums(merge_totals(totals), NO_LIMITS)))

    def _place(self, piece: SumPiece, sums: Sequence[Any]) -> list[Any]:
        """Return sums, or their totals, on this host's devices, sharded as the weights are that they are of."""
        specs = [self.sharding.find_weight_spec(name) for name in sorted(piece.shapes.gradients)]
        specs += [P()] * (len(sums) - len(specs))
        return [
            jax.device_put(value, self.sharding.place(spec)) for value, spec in zip(sums, specs, strict=True)
        ]

    def _make_spec(self, piece: SumPiece, step: int) -> AccumulationSpec:
        return AccumulationSpec(
            name=f"block {piece.block}",
            step=step,
            num_microbatches=self._num_microbatches,
            reduction="exact_wide",
        )
