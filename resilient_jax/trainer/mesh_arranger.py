"""Replicas over all devices of one host or several, by axes that are given."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import StateTensor
from resilient_jax.planning.tensor_partition import find_violated_rules
from resilient_jax.program_analysis.program_analysis import list_state_tensors
from resilient_jax.sharding.partition_specs import StatePartitioner
from resilient_jax.sharding.placements import ParameterPlacement, ParameterSpecs
from resilient_jax.sharding.state_tensors import make_divisibility_rules
from resilient_jax.step.assignment import ReplicaShape, count_devices_by_host
from resilient_jax.trainer.accumulation import make_abstract
from resilient_jax.trainer.arrangement import REPLICA_AXES, Arrangement, list_parameter_specs, name_axes
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.loss_function import Mean
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.worker.world import World


class MeshArranger:
    """Makes the arrangement of each generation of one `fit`."""

    def __init__(self, config: FitConfig) -> None:
        self._config = config
        self._specs: ParameterSpecs | None = None

    def arrange(self, world: World, variables: Variables) -> Arrangement:
        """Return the arrangement for the live hosts, whose placement is on the mesh of all replicas.

        Raises:
            CallerError: the axes do not multiply to the devices of hosts, or an axis shards no parameter.
        """
        given = self._config.parallelism.axes
        assert given is not None
        sizes = {axis: given.get(axis.value, 1) for axis in REPLICA_AXES}
        num_devices, width = math.prod(sizes.values()), max(count_devices_by_host(world.devices))
        if num_devices % width:
            raise CallerError(
                f"parallelism: found axes {dict(given)} for hosts of {width} devices, expected sizes that multiply to "
                f"those of one host or several: {width}, {2 * width}, ..."
            )
        shape = ReplicaShape(hosts=num_devices // width, axes=name_axes(sizes))
        return Arrangement(
            replica_shape=shape,
            placement=ParameterPlacement(world.mesh(shape), self._find_specs(sizes, variables)),
        )

    def _find_specs(self, sizes: Mapping[Axis, int], variables: Variables) -> ParameterSpecs:
        if self._specs is None:  # the same in every generation
            recipe, batch = self._config.recipe, make_abstract(self._config.data.batch(0, 0))

            def loss(model: Any, batch: Any) -> Mean:  # noqa: ANN401 - the user's
                return recipe.loss_fn(model, batch, jax.random.key(0))[0]

            rules = self._config.parallelism.logical_axis_rules
            tensors = list_state_tensors(self._config.model, loss, batch, logical_axis_rules=rules)
            _check_names(tensors, sizes)
            self._specs = list_parameter_specs(StatePartitioner(tensors, sizes, rules), variables)
        return self._specs


def _check_names(tensors: Sequence[StateTensor], sizes: Mapping[Axis, int]) -> None:
    """Check that a replica's axes take the named dims.

    Raises:
        CallerError: the axis of a name is none of a replica, or does not divide a dim that it is to shard.
    """
    for tensor in tensors:
        for name, axis in zip(tensor.logical_names, tensor.axes, strict=True):
            if axis is not None and axis not in sizes:
                raise CallerError(
                    f"parallelism: found the logical name {name!r} of {tensor.path} for the axis {axis}, expected one "
                    f"of {', '.join(sizes)}, or None. Change LogicalAxisRules(mesh_axes=)"
                )
    rules = make_divisibility_rules(tensors, num_layers=1, sequence_tokens=None)
    for axis in {rule.axis for rule in rules}:  # of an axis without a dim the partitioner says so
        if misfits := find_violated_rules(rules, axis, sizes[axis]):
            named = ", ".join(f"{rule.logical_name} = {rule.dim_size}" for rule in misfits)
            raise CallerError(
                f"parallelism: found axes with {axis} {sizes[axis]}, expected a size that divides the dims with names "
                f"for it: {named}. Choose another, or give these names no axis: LogicalAxisRules(mesh_axes=)"
            )
