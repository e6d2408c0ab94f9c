"""The mesh under which a user's loss is traced: a bare `PartitionSpec` on an activation is over its axes."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from resilient_jax.errors import CallerError


def make_trace_mesh(axis_names: Sequence[str]) -> AbstractMesh:
    """Return a mesh of one device with these axes, to trace before there are devices."""
    # As of a `Mesh`: since jax 0.12 the axes of an abstract mesh would be explicit.
    return AbstractMesh(
        (1,) * len(axis_names), tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names)
    )


@contextlib.contextmanager
def use_trace_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Trace under the mesh of a replica, or that of a plan.

    Raises:
        CallerError: the loss or the model names an axis that the mesh does not have, or an `axis_name` of `pmap`.
        Exception: what the loss raises, unchanged.
    """
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    try:
        with jax.sharding.use_abstract_mesh(abstract):
            yield
    except ValueError as error:
        if "is not found in mesh" not in str(error):
            raise
        raise CallerError(
            f"loss_fn: found a PartitionSpec of an axis that the replica's mesh does not have ({error}), expected "
            f"{', '.join(map(str, abstract.axis_names))}. Use these, or, without a plan, name others: "
            "rj.Parallelism(replica_shape=rj.ReplicaShape(axes=((name, size), ...))). Logical names of Linen's "
            "parameters are given by nn.with_logical_partitioning"
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise CallerError(
            f"loss_fn: found a collective over a named axis ({error}), expected none: a microbatch is computed as one "
            "array, whichever devices share it. Remove axis_name= and jax.lax.pmean; gradients, metrics and batch "
            "statistics are averaged over the microbatches of a step for you"
        ) from error
