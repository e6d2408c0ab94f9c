"""Which parameters belong to equal layers, seen from their paths.

Either each layer has a place of its own (`blocks/0/...`, `Block_0/...`), or their parameters are stacked over a dim
that is named "layers". A stack of layers is the longest run of such places that hold the same.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping

from resilient_jax.planning.axes import LAYERS
from resilient_jax.sharding.logical_axes import LogicalNames

_NUMBERED = re.compile(r"(.*?)(\d+)")
"""A part of a path that ends with a number: `7`, `Block_7`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPosition:
    """Where a parameter stands among equal layers.

    Attributes:
        path: with `*` for the number of the layer.
        layer: its number; None: it is in no layer, or in all of them.
        copies: layers that it stands for.
        dim: over which layers are stacked; None: they are not.
    """

    path: str
    layer: int | None = None
    copies: int = 1
    stack_dim: int | None = None

    @property
    def is_in_layer(self) -> bool:
        """Whether it belongs to the layers."""
        return self.layer is not None or self.stack_dim is not None


def find_layer_positions(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, LogicalNames]
) -> dict[str, LayerPosition]:
    """Gives the place of each parameter.

    Args:
        shapes: of all parameters, by path.
        names: of the dims of each, by path.
    """
    stacked = {path: dims.index(LAYERS) for path, dims in names.items() if LAYERS in dims}
    if stacked:
        count = max(shapes[path][dim] for path, dim in stacked.items())
        places = {path: LayerPosition(path=path) for path in shapes}
        for path, dim in stacked.items():
            if shapes[path][dim] == count:
                places[path] = LayerPosition(path=path, copies=count, stack_dim=dim)
        return places
    run = _longest_run(shapes)
    return {path: run.get(path, LayerPosition(path=path)) for path in shapes}


def _longest_run(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LayerPosition]:
    """The places of all parameters in the largest family of equal numbered places; none if there are not two."""
    families: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for path in shapes:
        parts = path.split("/")
        for depth, part in enumerate(parts):
            if match := _NUMBERED.fullmatch(part):
                stem = "/".join([*parts[:depth], f"{match[1]}*"])
                rest = "/".join(parts[depth + 1 :])
                families[stem][int(match[2])][rest] = path
                break  # the outermost number is the layer's
    best: dict[str, LayerPosition] = {}
    most = 1
    for stem, members in families.items():
        alike = {
            frozenset((rest, shapes[path]) for rest, path in inside.items()) for inside in members.values()
        }
        if len(alike) == 1 and len(members) > most:
            most = len(members)
            best = {
                path: LayerPosition(path=f"{stem}/{rest}".rstrip("/"), layer=number, copies=len(members))
                for number, inside in members.items()
                for rest, path in inside.items()
            }
    return best
