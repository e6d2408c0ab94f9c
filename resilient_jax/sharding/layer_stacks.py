"""Stacks of equal layers among a model's parameters, found by the parameters' paths.

Either each layer has a path of its own (`blocks/0/...`, `Block_0/...`), or the parameters of all layers are stacked
over a dim with the logical name "layers". The layers are the largest family of numbered paths with equal parameters.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping

from resilient_jax.planning.axes import LAYERS
from resilient_jax.sharding.logical_axes import LogicalNames

_NUMBERED = re.compile(r"(.*?)(\d+)")
"""A component of a path that ends with a number: `7`, `Block_7`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPosition:
    """The position of a parameter among equal layers.

    Attributes:
        path: path of the parameter, with `*` for the number of the layer.
        layer: number of the layer; None: the parameter is in no layer, or in all of them.
        copies: number of layers that have such a parameter; 1 outside of layers.
        stack_dim: the dim over which layers are stacked; None: layers are not stacked.
    """

    path: str
    layer: int | None = None
    copies: int = 1
    stack_dim: int | None = None

    @property
    def is_in_layer(self) -> bool:
        """Whether the parameter belongs to the layers."""
        return self.layer is not None or self.stack_dim is not None


def find_layer_positions(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, LogicalNames]
) -> dict[str, LayerPosition]:
    """Return the position of each parameter.

    Args:
        names: names of the dims of each parameter, by path.
    """
    stacked = {path: dims.index(LAYERS) for path, dims in names.items() if LAYERS in dims}
    if stacked:
        count = max(shapes[path][dim] for path, dim in stacked.items())
        positions = {path: LayerPosition(path=path) for path in shapes}
        for path, dim in stacked.items():
            if shapes[path][dim] == count:
                positions[path] = LayerPosition(path=path, copies=count, stack_dim=dim)
        return positions
    family = _find_largest_family(shapes)
    return {path: family.get(path, LayerPosition(path=path)) for path in shapes}


def _find_largest_family(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LayerPosition]:
    """Return the positions of the parameters in the largest family of equal numbered paths; none if all differ."""
    families: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for path in shapes:
        parts = path.split("/")
        for depth, part in enumerate(parts):
            if match := _NUMBERED.fullmatch(part):
                stem = "/".join([*parts[:depth], f"{match[1]}*"])
                rest = "/".join(parts[depth + 1 :])
                families[stem][int(match[2])][rest] = path
                # The outermost number is the layer's.
                break
    best: dict[str, LayerPosition] = {}
    best_count = 1
    for stem, members in families.items():
        contents = {
            frozenset((rest, shapes[path]) for rest, path in inside.items()) for inside in members.values()
        }
        if len(contents) == 1 and len(members) > best_count:
            best_count = len(members)
            best = {
                path: LayerPosition(path=f"{stem}/{rest}".rstrip("/"), layer=number, copies=len(members))
                for number, inside in members.items()
                for rest, path in inside.items()
            }
    return best
