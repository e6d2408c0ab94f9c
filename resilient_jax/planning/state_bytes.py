"""How much of the training state one device holds, by part; by the same `cut` that shards the program."""

from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.cutting import count_parts
from resilient_jax.planning.profile import Part, Profile, Role
from resilient_jax.planning.shape import Group


class PartBytes(NamedTuple):
    """Of one part (one layer of `Part.LAYER`), on one device.

    Attributes:
        parameters: between steps.
        gradients: the sum of a step's gradients.
        optimizer: and all else that is neither parameter nor gradient.
        gathered: parameters in the type of matrix products, as FSDP gathers them.
        gathered_gradients: gradients before FSDP scatters them.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    gathered_gradients: float = 0.0

    def plus(self, other: "PartBytes") -> "PartBytes":
        """Both together."""
        return PartBytes(*(mine + its for mine, its in zip(self, other, strict=True)))


class StateBytes(NamedTuple):
    """Of one device, if it has a part. What the embedding and the head share is in `tied`, once."""

    embedding: PartBytes
    layer: PartBytes
    head: PartBytes
    tied: PartBytes

    def stage(self, layers: int, *, is_first: bool, is_last: bool) -> PartBytes:
        """Of a device of a stage with so many layers."""
        return PartBytes(
            *(
                layers * layer + is_first * embedding + is_last * head + (is_first or is_last) * tied
                for layer, embedding, head, tied in zip(
                    self.layer, self.embedding, self.head, self.tied, strict=True
                )
            )
        )


def count_state(profile: Profile, group: Group) -> StateBytes:
    """Gives what a device holds of each part under these axes; replicas, sequence and pipeline cut no tensor."""
    sizes = group.cut_sizes
    gathered_sizes = {**sizes, Axis.FSDP: 1}
    parts: dict[tuple[object, ...], tuple[int, int]] = {}
    totals = {"embedding": PartBytes(), "layer": PartBytes(), "head": PartBytes(), "tied": PartBytes()}
    for tensor in profile.tensors:
        key = (tensor.shape, tensor.axes, tensor.units)
        if key not in parts:
            parts[key] = (count_parts(tensor, sizes), count_parts(tensor, gathered_sizes))
        own, whole = parts[key]
        is_layer = tensor.parts == (Part.LAYER,)
        copies = tensor.copies / (max(profile.layers, 1) if is_layer else 1)
        numbers, held = tensor.size / tensor.copies * copies, copies * tensor.bytes / tensor.copies / own
        place = "tied" if len(tensor.parts) > 1 else next(iter(tensor.parts)).value
        if tensor.role is Role.PARAMETER:
            more = PartBytes(
                parameters=held,
                gradients=numbers * profile.gradient_bytes / own,
                gathered=numbers * profile.compute_bytes / whole,
                gathered_gradients=numbers * profile.gradient_bytes / whole,
            )
        else:
            more = PartBytes(optimizer=held)
        totals[place] = totals[place].plus(more)
    return StateBytes(**totals)
