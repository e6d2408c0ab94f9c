"""Where each leaf of a training state lies between steps: whole on every device, or cut over all hosts.

A placement is a pure function of a leaf and of a mesh's axes, so every host finds the same, and gradients and
moments lie where their parameter lies. With the mesh's shape alone (`with_abstract_mesh`) it may stand in a program.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Final, Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MIN_SHARDED_SIZE: Final = 1024
"""Numbers in a leaf that is worth a cut: below it, names and offsets of pieces outweigh what they hold. Numbers and not
bytes, so that a gradient is cut as its parameter is, whatever their types."""

ParameterSpecs = tuple[tuple[str, tuple[int, ...], P], ...]
"""Path, shape and spec of each parameter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement(abc.ABC):
    """Gives each leaf its sharding; usable as `World.restore_or_init(sharding=)`.

    Attributes:
        mesh: with devices, or its shape alone.
    """

    mesh: Mesh | AbstractMesh

    @abc.abstractmethod
    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct) -> P:
        """Which dims of a leaf are cut, over which axes. Its path is as `jax.tree_util.keystr` writes it."""

    def __call__(self, path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Where the leaf lies."""
        return NamedSharding(self.mesh, self.partition_spec(path, leaf))

    def with_mesh(self, mesh: Mesh | AbstractMesh) -> Self:
        """The same over another mesh, with devices or its shape alone."""
        return dataclasses.replace(self, mesh=mesh)

    def with_abstract_mesh(self) -> Self:
        """The same over the mesh's shape."""
        return self.with_mesh(self.mesh.abstract_mesh)


class ReplicatedPlacement(Placement):
    """Every leaf whole on every device of the mesh."""

    __slots__ = ()

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct) -> P:
        """No dim."""
        return P()


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPlacement(Placement):
    """Every leaf cut as a table says of the parameter whose path ends its own and whose shape is its; others whole.

    Attributes:
        table: of the parameters.
    """

    parameter_specs: ParameterSpecs

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct) -> P:
        """That of the parameter with the longest path that fits."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return P()
        fitting = [
            (parameter, spec)
            for parameter, shape, spec in self.parameter_specs
            if shape == tuple(leaf.shape) and path.endswith(parameter)
        ]
        return max(fitting, key=lambda pair: len(pair[0]))[1] if fitting else P()


class FullyShardedPlacement(Placement):
    """Every leaf cut over as many devices of the mesh as one of its dims divides by.

    Whole stay leaves of fewer than `SMALLEST` numbers, random keys, and those whose dims divide by no axis.
    """

    __slots__ = ()

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct) -> P:
        """One dim, over one or several axes: most devices first, then the mesh's first axes, then the largest dim."""
        if math.prod(leaf.shape) < MIN_SHARDED_SIZE or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return P()
        # The first dim of the largest size, wherever several would do.
        dims = sorted(range(len(leaf.shape)), key=lambda dim: -leaf.shape[dim])
        for axes in self._choices():
            count = math.prod(self.mesh.shape[axis] for axis in axes)
            for dim in dims:
                if leaf.shape[dim] % count == 0:
                    return P(*[None] * dim, axes[0] if len(axes) == 1 else axes)
        return P()

    def _choices(self) -> Iterator[tuple[str, ...]]:
        """Sets of axes that cut, best first."""
        names = [str(axis) for axis in self.mesh.axis_names if self.mesh.shape[axis] > 1]
        sets = [s for count in range(1, len(names) + 1) for s in itertools.combinations(names, count)]
        # Stable: of two sets with as many devices, the one that begins with the earlier axis stays in front.
        yield from sorted(sets, key=lambda axes: -math.prod(self.mesh.shape[axis] for axis in axes))


def fully_sharded(mesh: Mesh | AbstractMesh) -> FullyShardedPlacement:
    """A state of which each host has its share only: FSDP's parameters and optimizer state between steps.

    (Zhao et al. 2023, https://arxiv.org/abs/2304.11277; Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.)

    Args:
        mesh: of any axes; the hosts' axis first, so that a dim that divides by hosts and by local devices, but not
            by both, is cut over hosts where that is no loss.

    >>> from jax.sharding import AbstractMesh
    >>> rule = fully_sharded(AbstractMesh((3, 2), ("host", "local")))
    >>> [tuple(rule.spec("", jax.ShapeDtypeStruct(shape, jnp.float32))) for shape in ((160, 192), (160, 160), (9,))]
    [(None, ('host', 'local')), ('local',), ()]
    """
    return FullyShardedPlacement(mesh)
