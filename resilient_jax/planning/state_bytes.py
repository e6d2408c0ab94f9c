"""The bytes of the training state on one device, by part.

`tensor_partition` decides how a tensor is sharded, for this count as for the program. A tensor of n elements that is
divided into s equal shards, and into s' without FSDP, counts `n dtype / s` bytes between steps, `n gradient / s` of
gradients, `n compute / s'` when FSDP has gathered it, and `n gradient / s'` of gradients before FSDP scatters them.
"""

import operator
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import ReplicaAxes
from resilient_jax.planning.program_cost import ModelPart, ProgramCost, StateTensor, TensorRole
from resilient_jax.planning.tensor_partition import count_shards


class PartBytes(NamedTuple):
    """Bytes of one part (one layer of `ModelPart.LAYER`) on one device.

    Attributes:
        parameters: parameters between steps.
        gradients: the sum of a step's gradients.
        optimizer: optimizer state, and all else that is neither parameter nor gradient.
        gathered: parameters in the dtype of matrix products, as FSDP gathers them.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    gathered_gradients: float = 0.0

    @property
    def updated(self) -> float:
        """Bytes that the optimizer reads and writes: parameters and its state both, gradients only read."""
        return 2 * self.parameters + self.gradients + 2 * self.optimizer

    def plus(self, other: "PartBytes") -> "PartBytes":
        """Return the sum of both, field by field."""
        return PartBytes(*map(operator.add, self, other))


class StateBytes(NamedTuple):
    """Bytes of each part on a device that has it. What the embedding and the head share is in `tied`, once."""

    embedding: PartBytes
    layer: PartBytes
    head: PartBytes
    tied: PartBytes

    def count_stage(self, layers: int, *, is_first: bool, is_last: bool) -> PartBytes:
        """Return the bytes of a device of a stage with so many layers."""
        # Bytes: L layer + embedding (first stage) + head (last stage) + tied (either end, once if one stage is both).
        held = PartBytes(*[layers * number for number in self.layer])
        if is_first:
            held = held.plus(self.embedding)
        if is_last:
            held = held.plus(self.head)
        return held.plus(self.tied) if is_first or is_last else held


class _Row(NamedTuple):
    """A tensor: the part that counts it, elements and bytes of one layer, and the index of its kind of partition."""

    part: str
    is_parameter: bool
    elements: float
    bytes: float
    partition: int


class StateCounter:
    """The bytes of each part of one program, under any axes; tensors that are partitioned alike are so once."""

    def __init__(self, program_cost: ProgramCost) -> None:
        self._program_cost = program_cost
        self._kinds: list[StateTensor] = []
        self._rows: list[_Row] = []
        known: dict[tuple[object, ...], int] = {}
        for tensor in program_cost.tensors:
            key = (tensor.shape, tensor.axes, tensor.units)
            if key not in known:
                known[key] = len(self._kinds)
                self._kinds.append(tensor)
            # A row counts one layer: (copies / L) (elements of a copy); the ends have L = 1.
            copies = tensor.copies / (
                max(program_cost.layers, 1) if tensor.parts == (ModelPart.LAYER,) else 1
            )
            self._rows.append(
                _Row(
                    part="tied" if len(tensor.parts) > 1 else next(iter(tensor.parts)).value,
                    is_parameter=tensor.role is TensorRole.PARAMETER,
                    elements=tensor.size / tensor.copies * copies,
                    bytes=copies * tensor.bytes / tensor.copies,
                    partition=known[key],
                )
            )

    def count(self, axes: ReplicaAxes) -> StateBytes:
        """Return the bytes of each part under these axes."""
        # Bytes of a tensor of n elements per layer, with s shards under FSDP and s' without:
        #     parameters n dtype / s      gradients n gradient / s
        #     gathered n compute / s'     gathered gradients n gradient / s'
        # What is no parameter counts as optimizer: n dtype / s.
        program_cost, sizes = self._program_cost, axes.state_axis_sizes
        gathered_sizes = {**sizes, Axis.FSDP: 1}
        parts = [(count_shards(one, sizes), count_shards(one, gathered_sizes)) for one in self._kinds]
        totals = {part: [0.0] * len(PartBytes._fields) for part in StateBytes._fields}
        for part, is_parameter, elements, size, partition in self._rows:
            shards, gathered_shards = parts[partition]
            total = totals[part]
            if is_parameter:
                total[0] += size / shards
                total[1] += elements * program_cost.gradient_bytes / shards
                total[3] += elements * program_cost.compute_bytes / gathered_shards
                total[4] += elements * program_cost.gradient_bytes / gathered_shards
            else:
                total[2] += size / shards
        return StateBytes(**{part: PartBytes(*total) for part, total in totals.items()})
