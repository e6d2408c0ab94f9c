"""The sharding of each leaf of a training state between steps: replicated on every device, or sharded over all hosts.

A placement is a pure function of a leaf and of a mesh's axes, so every host finds the same, and gradients and optimizer
moments are sharded as their parameter is. With an abstract mesh (`with_abstract_mesh`) it may be used in a program.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Final, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.raveled_array import RaveledArray, is_raveled

Tree = TypeVar("Tree")
MIN_SHARDED_SIZE: Final = 1024
"""Elements of a leaf that is worth sharding: below it, names and offsets of shards outweigh their contents. Elements
and not bytes, so that a gradient is sharded as its parameter is, whatever their dtypes."""

REPLICA_AXIS: Final = "replica"
"""The axis over replicas, the first one of a mesh that has all of them."""

ParameterSpecs = tuple[tuple[str, tuple[int, ...], P], ...]
"""Path, shape and spec of each parameter."""


def make_zero(leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """Return an array of zeros, of which each host makes its shards.

    Not by `jax.device_put`, which compares what all hosts of a sharding put, by a collective for each array.
    """
    zero = np.zeros((), leaf.dtype)
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: np.broadcast_to(zero, leaf.shape)[index], dtype=leaf.dtype
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Placement(abc.ABC):
    """Gives each leaf its sharding; usable as `World.restore_or_init(sharding=)`.

    Attributes:
        mesh: mesh with devices, or abstract.
    """

    mesh: Mesh | AbstractMesh

    @abc.abstractmethod
    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct | RaveledArray) -> P:
        """Return over which axes each dim of a leaf is sharded; `path` is as `jax.tree_util.keystr` writes it.

        Of a raveled array it is the spec of its vector.
        """

    def __call__(self, path: str, leaf: jax.ShapeDtypeStruct | RaveledArray) -> NamedSharding:
        """Return the sharding of a leaf, or of a raveled array's vector."""
        return NamedSharding(self.mesh, self.partition_spec(path, leaf))

    def with_mesh(self, mesh: Mesh | AbstractMesh) -> Self:
        """Return the same placement over another mesh, with devices or abstract."""
        return dataclasses.replace(self, mesh=mesh)

    def with_abstract_mesh(self) -> Self:
        """Return the same placement over the abstract mesh."""
        return self.with_mesh(self.mesh.abstract_mesh)


class ReplicatedPlacement(Placement):
    """Every leaf replicated on every device of the mesh."""

    __slots__ = ()

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct | RaveledArray) -> P:
        """Return the empty spec: no axis shards the leaf."""
        return P()


class RaveledPlacement(Placement):
    """Every raveled leaf over all devices of the mesh; others replicated."""

    __slots__ = ()

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct | RaveledArray) -> P:
        """Return all axes for the vector of a raveled leaf."""
        return P(tuple(map(str, self.mesh.axis_names))) if is_raveled(leaf) else P()


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPlacement(Placement):
    """Every leaf sharded as the parameter of the same shape whose path ends the leaf's path; others replicated."""

    parameter_specs: ParameterSpecs

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct | RaveledArray) -> P:
        """Return the spec of the matching parameter with the longest path."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return P()
        fitting = [
            (parameter, spec)
            for parameter, shape, spec in self.parameter_specs
            if shape == tuple(leaf.shape) and path.endswith(parameter)
        ]
        return max(fitting, key=lambda pair: len(pair[0]))[1] if fitting else P()


class FullyShardedPlacement(Placement):
    """Every leaf sharded over as many devices of the mesh as divide one of its dims; a raveled one over all of them.

    Leaves of fewer than `MIN_SHARDED_SIZE` elements, random keys, and leaves whose dims no axis divides are replicated.
    """

    __slots__ = ()

    def partition_spec(self, path: str, leaf: jax.ShapeDtypeStruct | RaveledArray) -> P:
        """Return one sharded dim: over most devices, of those over the mesh's first axes, of those the largest dim."""
        if isinstance(leaf, RaveledArray):
            return P(tuple(map(str, self.mesh.axis_names)))
        if math.prod(leaf.shape) < MIN_SHARDED_SIZE or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return P()
        # Stable: of dims of one size the first.
        dims = sorted(range(len(leaf.shape)), key=lambda dim: -leaf.shape[dim])
        for axes in self._choices():
            count = math.prod(self.mesh.shape[axis] for axis in axes)
            for dim in dims:
                if leaf.shape[dim] % count == 0:
                    return P(*[None] * dim, axes[0] if len(axes) == 1 else axes)
        return P()

    def _choices(self) -> Iterator[tuple[str, ...]]:
        """Yield the sets of axes, most devices first."""
        names = [str(axis) for axis in self.mesh.axis_names if self.mesh.shape[axis] > 1]
        sets = [s for count in range(1, len(names) + 1) for s in itertools.combinations(names, count)]
        # Stable: of two sets with as many devices, the one that begins with the earlier axis stays in front.
        yield from sorted(sets, key=lambda axes: -math.prod(self.mesh.shape[axis] for axis in axes))


def fully_sharded(mesh: Mesh | AbstractMesh) -> FullyShardedPlacement:
    """Return the placement of FSDP: each host has only its shards of parameters and optimizer state between steps.

    (Zhao et al. 2023, https://arxiv.org/abs/2304.11277; Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.)

    Args:
        mesh: mesh of any axes; the hosts' axis first, so that a dim that is divisible by hosts and by local devices,
            but not by their product, is sharded over hosts where that gives no fewer shards.

    >>> from jax.sharding import AbstractMesh
    >>> rule = fully_sharded(AbstractMesh((3, 2), ("host", "local")))
    >>> leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((160, 192), (160, 160), (9,))]
    >>> [tuple(rule.partition_spec("", leaf)) for leaf in leaves]
    [(None, ('host', 'local')), ('local',), ()]
    """
    return FullyShardedPlacement(mesh)


def constrain_sharding(tree: Tree, placement: Placement) -> Tree:
    """Return the tree with the shardings of a placement, which has no devices."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.tree.map(
            # Of a raveled array its vector is the only leaf.
            lambda array: jax.lax.with_sharding_constraint(
                array, placement(jax.tree_util.keystr(path), leaf)
            ),
            leaf,
        ),
        tree,
        is_leaf=is_raveled,
    )
