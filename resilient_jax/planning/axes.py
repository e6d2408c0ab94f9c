"""The axes that a plan may have, and which of them cuts a dim of which logical name.

The names are those that Flax users give (https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html).
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from resilient_jax.planning.errors import PlanError


class Axis(enum.StrEnum):
    """One axis of a plan's mesh. Cut means: each device along it has an equal part and not the whole."""

    REPLICA = "replica"
    """Complete copies of the model; cuts the batch and no tensor."""
    FSDP = "fsdp"
    """Cuts the batch, and every parameter with its gradient and optimizer state; gathered before use."""
    TENSOR = "tensor"
    """Cuts heads, feed-forward and vocabulary."""
    SEQUENCE = "sequence"
    """Cuts the tokens of a sequence."""
    EXPERT = "expert"
    """Cuts the experts; each token goes to where its experts are."""
    PIPELINE = "pipeline"
    """Cuts the stack of layers into stages."""


AxisSizes = Mapping[Axis, int] | Mapping[str, int]
"""Of axes, by what they are or by their names."""


def parse_axis_sizes(given: AxisSizes) -> dict[Axis, int]:
    """Gives the sizes by axis.

    Raises:
        PlanError: there is no axis of such a name.

    >>> parse_axis_sizes({"tensor": 2})
    {<Axis.TENSOR: 'tensor'>: 2}
    """
    for name in given:
        if name not in list(Axis):
            raise PlanError(f"axes: found {name!r}, expected names of {', '.join(Axis)}")
    return {Axis(name): size for name, size in given.items()}


LAYERS: Final = "layers"
"""The dim over which the parameters of equal layers are stacked; it is none of a tensor's own dims."""

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
"""Which axis cuts a dim of a logical name; None: none but FSDP, where it finds no better dim."""
