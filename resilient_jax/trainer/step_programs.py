"""The programs of a step in an arrangement that is likely next, compiled for the persistent cache."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.errors import CallerError
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.sharding.placements import Placement
from resilient_jax.step import resharding
from resilient_jax.step.accumulation_call import AccumulationCall
from resilient_jax.step.accumulation_layout import describe_summand
from resilient_jax.step.assignment import (
    AccumulationSpec,
    ReplicaLocation,
    ReplicaShape,
    locate_replicas,
)
from resilient_jax.step.host_grid import LOCAL_AXIS, LiveHosts
from resilient_jax.step.reduction import compile_read
from resilient_jax.step.replicas import Replica, build_replicas, make_replica_mesh
from resilient_jax.step.running_total import compile_host_total, compile_totals
from resilient_jax.trainer.arrangement import Arrangement
from resilient_jax.trainer.sharded_norm import compile_squares
from resilient_jax.trainer.train_step import TrainStep

Tree = Any
"""A pytree."""


class LikelyReplicas(NamedTuple):
    """The replicas of hosts that are likely next, with this host in one of them.

    Attributes:
        mesh: all replicas, the outermost axis, with the axes of each.
        own: the replica of this host.
    """

    mesh: Mesh
    own: Replica


def find_likely_replicas(live: LiveHosts, shape: ReplicaShape) -> LikelyReplicas | None:
    """Return the replicas of hosts, each of whole hosts; None: too few for one, or too few devices on this host."""
    by_host, own = list(live.devices_by_host), live.host_index
    try:
        locations = locate_replicas(range(len(by_host)), shape, [len(devices) for devices in by_host])
    except CallerError:
        return None
    if len(by_host[own]) < locations[0].devices:
        return None
    if all(own not in location.host_indexes for location in locations):
        # Left over among these, it is in a replica of others that are as many.
        place = locations[0].host_indexes[0]
        by_host[place], by_host[own] = by_host[own], by_host[place]
        own = place
    (replica,) = build_replicas(locations, by_host, own, shape).values()
    return LikelyReplicas(make_replica_mesh(locations, by_host, shape), replica)


def compile_mesh_step(
    programs: TrainStep,
    arrangement: Arrangement,
    live: LiveHosts,
    spec: AccumulationSpec,
    check: CancellationCheck,
) -> bool:
    """Compile what these hosts run in a step of replicas that are whole hosts; return whether it is usable."""
    shape, own_devices = arrangement.replica_shape, live.devices_by_host[live.host_index]
    replicas = find_likely_replicas(live, shape)
    if replicas is None or not is_portable_cache_on(own_devices[0]):
        return False
    placement = arrangement.placement.with_mesh(replicas.mesh)
    on_replica = placement.with_mesh(replicas.own.mesh)
    check()
    programs.compute.lower(
        _shapes(programs.abstract_state.variables, on_replica),
        replicas.own.describe_batch(programs.example),
        np.zeros(2, np.uint32),
        placement=on_replica.with_abstract_mesh(),
    ).compile()
    local_mesh = Mesh(np.array(own_devices[: replicas.own.mesh.size // shape.hosts]), (LOCAL_AXIS,))
    sums = _shapes(programs.abstract_sums, placement)
    like = jax.tree.map(lambda leaf: describe_summand(leaf, local_mesh), sums)
    compile_totals(spec, like, check)
    is_whole = [leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(sums)]
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for whole, leaf in zip(is_whole, jax.tree.leaves(like), strict=True):
        parts[whole].append(leaf)
    call = AccumulationCall(
        devices=own_devices,
        spare_devices=(),
        process_index=ProcessIndex(live.process_indexes[live.host_index]),
        spec=spec,
        replica_shape=shape,
        like=parts[True],
        shards=parts[False],
    )
    call.compile_for_grid(live.grid, shape, check)
    check()
    compile_squares(replicas.mesh, jax.tree.leaves(sums.gradients), own_devices[0])
    compile_mesh_update(programs, placement, check)
    return True


def compile_mesh_update(programs: TrainStep, placement: Placement, check: CancellationCheck) -> None:
    """Compile the update of a state in shards on the mesh of all replicas."""
    sums = programs.abstract_sums.gradients, programs.abstract_sums.collections
    state, cut = resharding.abstract_shards((programs.abstract_state, sums), placement)
    check()
    programs.update.lower(
        state, cut, programs.abstract_summary, placement=placement.with_abstract_mesh()
    ).compile()


def compile_step(
    programs: TrainStep,
    arrangement: Arrangement,
    devices: list[Device],
    example: Tree,
    spec: AccumulationSpec,
    check: CancellationCheck,
) -> None:
    """Lower and compile the programs that a step of an arrangement runs on this host's devices."""
    shape, placement = arrangement.replica_shape.for_host(len(devices)), arrangement.placement
    # Of this host alone: a planned replica is inside a host, and its programs depend on no other.
    count, width = shape.divide_host(len(devices), math.prod(size for _, size in shape.axes))
    seats = [ReplicaLocation((0,), slot, width) for slot in range(count)]
    for replica in build_replicas(seats, [devices], 0, shape).values():
        check()
        there = placement.with_mesh(replica.mesh)
        rows = NamedSharding(replica.mesh, P(replica.mesh.axis_names[0]))
        programs.compute.lower(
            _shapes(programs.abstract_state.variables, there),
            jax.tree.map(lambda leaf, to=rows: _shape(leaf, to), example),
            np.zeros(2, np.uint32),
            placement=there.with_abstract_mesh(),
        ).compile()
        compile_totals(spec, _shapes(programs.abstract_sums, there), check)
    sums = _shapes(programs.abstract_sums, placement)
    compile_host_total(spec, sums, check, has_several=len(seats) > 1)
    check()
    compile_read(spec, sums)
    check()
    measure = programs.summarize.lower(sums).compile()
    summary, _ = jax.tree.map(
        _shape, jax.eval_shape(programs.summarize, programs.abstract_sums), measure.output_shardings
    )
    check()
    programs.update.lower(
        _shapes(programs.abstract_state, placement),
        (sums.gradients, sums.collections),
        summary,
        placement=placement.with_abstract_mesh(),
    ).compile()


def _shapes(tree: Tree, placement: Placement) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _shape(leaf, placement(jax.tree_util.keystr(path), leaf)), tree
    )


def _shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - any array, any sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
