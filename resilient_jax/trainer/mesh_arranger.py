"""Replicas over all devices of one host or several, by axes that are given."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.program_analysis.program_analysis import list_state_tensors
from resilient_jax.sharding.partition_specs import StatePartitioner
from resilient_jax.sharding.placements import ParameterPlacement, ParameterSpecs
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

            tensors = list_state_tensors(self._config.model, loss, batch)
            self._specs = list_parameter_specs(StatePartitioner(tensors, sizes), variables)
        return self._specs
