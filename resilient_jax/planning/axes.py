"""The axes that a plan may have, and which of them shards a dim of which logical name.

The logical names are those of Flax's guide (https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html).
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from resilient_jax.planning.errors import PlanError


class Axis(enum.StrEnum):
    """One axis of a plan's mesh; a sharded array has an equal part on each device along the axis."""

    REPLICA = "replica"
    """Replicas of the model; shards the batch and no tensor."""
    FSDP = "fsdp"
    """Shards the batch, and each parameter with its gradient and optimizer state; gathered before use."""
    TENSOR = "tensor"
    """Shards heads, feed-forward and vocabulary."""
    SEQUENCE = "sequence"
    """Shards the tokens of a sequence."""
    EXPERT = "expert"
    """Shards the experts; tokens are sent to the devices of their experts."""
    PIPELINE = "pipeline"
    """Splits the stack of layers into stages."""


AxisSizes = Mapping[Axis, int] | Mapping[str, int]
"""Sizes by axis or by the axis's name."""


def parse_axis_sizes(given: AxisSizes) -> dict[Axis, int]:
    """Return the sizes by axis.

    Raises:
        PlanError: no axis has such a name.

    >>> parse_axis_sizes({"tensor": 2})
    {<Axis.TENSOR: 'tensor'>: 2}
    """
    for name in given:
        if name not in list(Axis):
            raise PlanError(f"axes: found {name!r}, expected names of {', '.join(Axis)}")
    return {Axis(name): size for name, size in given.items()}


LAYERS: Final = "layers"
"""Logical name of the dim over which the parameters of equal layers are stacked; no single layer's dim has it."""

AXIS_BY_LOGICAL_NAME: Final[Mapping[str, Axis | None]] = MappingProxyType(
    {
        "embed": Axis.FSDP,
        "heads": Axis.TENSOR,
        "kv_heads": Axis.TENSOR,
        "head_dim": None,
        "mlp": Axis.TENSOR,
        "vocab": Axis.TENSOR,
        "experts": Axis.EXPERT,
        "positions": None,
        "router": None,
    }
)
"""The axis that shards a dim of a logical name; None: FSDP alone, and only where it finds no better dim."""
