"""The mesh, the state's shardings and the compiled program of a plan."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_order import MESH_AXES, find_device_order
from resilient_jax.planning.plan import Plan
from resilient_jax.sharding.activation_constraints import constrain_activations
from resilient_jax.sharding.logical_axes import LogicalAxisRules, Tree
from resilient_jax.sharding.partition_specs import StatePartitioner, make_batch_specs
from resilient_jax.sharding.trace_mesh import use_trace_mesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProgram:
    """A function of a state and a batch, compiled for a plan's devices.

    Attributes:
        mesh: mesh of the plan, or of one of the plan's replicas.
        state_shardings, batch_shardings: shardings of the arguments, for `jax.device_put`,
            `World.restore_or_init(sharding=)`, `jax.make_array_from_process_local_data`.
        compiled: JAX's compiled program, with `memory_analysis()` and `cost_analysis()`.
        compile_s: seconds that the compilation took on this host.
    """

    mesh: Mesh
    state_shardings: Tree
    batch_shardings: Tree
    compiled: Compiled
    compile_s: float

    def __call__(self, state: Tree, batch: Tree) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run the program; a batch of numpy arrays is placed on the devices first."""
        return self.compiled(state, jax.tree.map(_place, batch, self.batch_shardings))


def make_mesh(plan: Plan, devices: Sequence[Any], replica: int | None = None) -> Mesh:
    """Return the plan's mesh: axes replica, pipeline, fsdp, expert, sequence, tensor, outermost first.

    Args:
        plan: the plan whose devices the mesh has.
        devices: all devices of the topology, host by host in the topology's order; the plan leaves out its spares.
        replica: index of the one replica whose devices to take; None: all replicas.

    Raises:
        CallerError: the number of devices differs from the topology's, or there is no such replica.
    """
    expected = plan.request.topology.device_count
    if len(devices) != expected:
        raise CallerError(
            f"mesh: found {len(devices)} devices, expected the {expected} of topology {plan.topology_name}, host "
            "by host in its order; the plan leaves out its spares. For other devices search a new plan"
        )
    sizes = get_mesh_sizes(plan)
    # The order of the devices puts the inner axes on the fast links, see `DeviceLayout`.
    grid = np.array([devices[number] for number in find_device_order(plan)])
    grid = grid.reshape([sizes[axis] for axis in MESH_AXES])
    if replica is not None:
        if not 0 <= replica < plan.replicas:
            raise CallerError(f"mesh: found replica {replica}, expected one from 0 to {plan.replicas - 1}")
        grid = grid[replica : replica + 1]
    return Mesh(grid, tuple(axis.value for axis in MESH_AXES))


def get_mesh_sizes(plan: Plan) -> dict[Axis, int]:
    """Return the size of each axis of a plan's mesh, outermost first."""
    return {axis: plan.axis_sizes[axis] for axis in MESH_AXES}


def make_state_shardings(
    plan: Plan, state: Tree, mesh: Mesh, logical_axis_rules: LogicalAxisRules | None = None
) -> Tree:
    """Return the sharding of each array of a training state: the state's tree with a `NamedSharding` per array.

    The logical names of dims come from the program cost that was planned for, else from `logical_axis_rules`, else
    from Flax metadata (NNX variables, Linen boxes). An array that none of them names is sharded by fsdp alone.

    Args:
        plan: the plan whose axes shard the state.
        state: a tree of arrays or of `jax.ShapeDtypeStruct`: parameters and optimizer state.
        mesh: the mesh of `make_mesh`.
        logical_axis_rules: `rj.LogicalAxisRules`, or None.

    Raises:
        CallerError: an axis of the plan shards no array of the state, or a logical name is unknown.
    """
    cuts = StatePartitioner(plan.request.program_cost.tensors, plan.axis_sizes, logical_axis_rules)
    return _shardings(cuts.specs(state), mesh)


def compile_plan(
    plan: Plan,
    function: Callable[[Tree, Tree], Any],
    state: Tree,
    batch: Tree,
    *,
    devices: Sequence[Any],
    replica: int | None = None,
    logical_axis_rules: LogicalAxisRules | None = None,
    donate_state: bool = True,
) -> PlannedProgram:
    """Compile `function(state, batch)` for the plan's devices; the result is called like the function.

    The state is sharded as by `make_state_shardings`, and so is a result that has the state's tree and shapes. The
    examples of a batch are sharded over replica and fsdp, dims of `sequence_tokens` over sequence; XLA inserts the
    collectives.

    Args:
        plan: the plan that the program is compiled for.
        function: a training step, a loss, or any function of a state and a batch. It is traced here. A bare
            `PartitionSpec` in it is over the axes of `make_mesh`.
        state: a tree of arrays or of `jax.ShapeDtypeStruct`.
        batch: a tree of arrays or of `jax.ShapeDtypeStruct`, whose first dim is the examples.
        devices: all devices of the topology, see `make_mesh`.
        replica: compile for the devices of this replica, such as one microbatch; None: for all replicas.
        logical_axis_rules: see `make_state_shardings`.
        donate_state: donate the state's buffers to the result.

    Raises:
        CallerError: the plan has pipeline stages: see `Trainer.compile_plan`; the examples do not divide; see
            `make_mesh` and `make_state_shardings`.
    """
    check_no_pipeline(plan)
    mesh = make_mesh(plan, devices, replica)
    sizes = plan.axis_sizes | ({Axis.REPLICA: 1} if replica is not None else {})
    where = make_state_shardings(plan, state, mesh, logical_axis_rules)
    rows = _shardings(make_batch_specs(batch, sizes, plan.request.program_cost.sequence_tokens), mesh)
    started_s = time.monotonic()

    @functools.wraps(function)
    def traced(state: Tree, batch: Tree) -> Any:  # noqa: ANN401 - whatever the function returns
        with use_trace_mesh(mesh):
            return function(state, batch)

    # FSDP shards parameters over the devices that have different examples, which XLA may confuse: see
    # `activation_constraints`. Other plans need no constraint.
    jitted = jax.jit(
        constrain_activations(traced, mesh) if sizes[Axis.FSDP] > 1 else traced,
        in_shardings=(where, rows),
        out_shardings=_out_shardings(traced, state, batch, where),
        donate_argnums=(0,) if donate_state else (),
    )
    compiled = jitted.lower(_shapes_of(state), _shapes_of(batch)).compile()
    return PlannedProgram(
        mesh=mesh,
        state_shardings=where,
        batch_shardings=rows,
        compiled=compiled,
        compile_s=time.monotonic() - started_s,
    )


def check_no_pipeline(plan: Plan) -> None:
    """Refuse a plan with a pipeline: that needs to know model, loss and optimizer apart.

    Raises:
        CallerError: the plan has stages.
    """
    stages = plan.axis_sizes[Axis.PIPELINE]
    if stages > 1:
        raise CallerError(
            f"compile_plan: found a plan with pipeline {stages} ({plan.shape}), expected pipeline 1: a function of a "
            "state and a batch cannot be cut into stages. Use rj.Trainer(...).compile_plan(plan, devices=...), which "
            "knows model, loss and optimizer, or search with axes={Axis.PIPELINE: 1}"
        )


def _out_shardings(function: Callable[[Tree, Tree], Any], state: Tree, batch: Tree, where: Tree) -> Tree:
    """Return the state's shardings for each result that is a state; None, the compiler's choice, for others."""
    wanted = _shapes_of(state)
    found = jax.eval_shape(function, wanted, _shapes_of(batch))

    def is_state(part: Tree) -> bool:
        """Compare shapes, too: metrics may have the tree of the state."""
        return jax.tree.structure(part) == jax.tree.structure(wanted) and all(
            (one.shape, one.dtype) == (other.shape, other.dtype)
            for one, other in zip(jax.tree.leaves(part), jax.tree.leaves(wanted), strict=True)
        )

    return jax.tree.map(lambda part: where if is_state(part) else None, found, is_leaf=is_state)


def _shardings(specs: Tree, mesh: Mesh) -> Tree:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def _shapes_of(tree: Tree) -> Tree:
    """Return shapes without shardings, which the program defines."""
    return jax.eval_shape(lambda same: same, tree)


def _place(rows: Any, sharding: NamedSharding) -> jax.Array:  # noqa: ANN401 - any array
    if isinstance(rows, jax.Array):
        return rows
    return jax.device_put(rows, sharding)
