"""A training state in shards on the devices of each replica, which has hosts of its own: no host has all of it.

Parameters, their gradients and the optimizer's state are on the mesh of all replicas, sharded over a replica's axes.
A microbatch is a program on a replica's mesh. Its gradient stays in shards; each host adds up its own, and the hosts
with the same shards add up theirs (`step.accumulation_layout`). The update needs no other host.

Hosts that are too few for one more replica take part in what all hosts agree on, and have nothing of the state.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck, CompilationJob
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.sharding.placements import Placement, make_zero
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.step.host_grid import LiveHosts
from resilient_jax.step.likely_worlds import list_likely_worlds
from resilient_jax.step.resharding import replicate_over
from resilient_jax.trainer.arrangement import Arrangement
from resilient_jax.trainer.fit_result import TrainedModel
from resilient_jax.trainer.sharded_norm import add_squares
from resilient_jax.trainer.state_layout import InShards, MeshShape
from resilient_jax.trainer.step_programs import compile_mesh_update, find_likely_replicas
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.trainer.training_state import (
    EarlyStoppingState,
    MicrobatchSums,
    StepSummary,
    TrainingState,
)
from resilient_jax.worker.world import World

Tree = TypeVar("Tree")


class MeshLayout(InShards):
    """The state is on the mesh of all replicas, each of which has one copy in shards."""

    def __init__(self, world: World, arrangement: Arrangement) -> None:
        super().__init__(world, arrangement.placement, arrangement)
        assert isinstance(self._placement.mesh, Mesh), "a generation's placement has devices"
        self._mesh = self._placement.mesh
        self._is_left_over = not self._mesh.local_devices
        self._exchange = CollectiveExchange.between_hosts(world)

    @functools.cached_property
    def local_sharding(self) -> NamedSharding:
        """The sharding that replicates an array on this host's devices of the mesh; of one left over on as many."""
        width = self._mesh.devices[0].size // self.arrangement.replica_shape.hosts
        devices = self._mesh.local_devices or self.world.local_devices[:width]
        return NamedSharding(Mesh(np.array(devices), ("local",)), P())

    def restore(
        self, init: Callable[[], TrainingState], load: Callable[[ShardingRule], TrainingState | None]
    ) -> TrainingState:
        """Return the state to continue from; an initial one is made in shards."""
        return super().restore(functools.partial(self._init_in_shards, init), load)

    def _init_in_shards(self, init: Callable[[], TrainingState]) -> TrainingState:
        if isinstance(jnp.zeros(()), Tracer):
            return init()  # traced for its shapes: most states come from other hosts, and none is made then
        abstract = jax.eval_shape(init)
        where = _place(abstract, self._placement)
        if not self._is_left_over:
            return collective_thread.run(jax.jit(init, out_shardings=where))
        return jax.tree.map(_have_nothing, abstract, where)

    def ravel(self, state: TrainingState) -> TrainingState:
        """Return the state: no leaf is kept raveled."""
        return state

    def gather(self, tree: Tree) -> Tree:
        """Return the leaves as they are: a replica computes with its shards."""
        return tree

    def gather_result(self, state: TrainingState) -> TrainedModel:
        """Return no model: no host has all of it. It is in the last checkpoint."""
        return TrainedModel(None, None)

    def read_step(self, state: TrainingState) -> int:
        """Return how many steps of a state are committed."""
        return self.world.step_services.committed_step if self._is_left_over else int(state.step)

    def read_early_stopping(self, state: TrainingState) -> EarlyStoppingState:
        """Return the state of early stopping, which hosts that are left over get from the first one that has it."""
        own = (0.0, 0)
        if not self._is_left_over:
            best, count = super().read_early_stopping(state)
            own = float(best), int(count)
        first = self.world.hosts.index(self.world.host_of_device(self._mesh.devices.flat[0]))
        ((best, count),) = self._exchange.gather(own, speakers=[first])
        return EarlyStoppingState(np.array(best, np.float32), np.array(count, np.int32))

    def read_learning_rate(self, state: TrainingState) -> dict[str, float]:
        """Return the metric `learning_rate`; none where this host has nothing of the state."""
        return {} if self._is_left_over else super().read_learning_rate(state)

    def make_zeros(self, abstract: Tree) -> Tree:
        """Return zeros in the shards of the sums; of what is whole, on this host's devices."""

        def make(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:  # noqa: ANN401 - keys of a tree
            sharding = self._placement(jax.tree_util.keystr(path), leaf)
            return make_zero(leaf, self.local_sharding if sharding.is_fully_replicated else sharding)

        return jax.tree_util.tree_map_with_path(make, abstract)

    def summarize(self, programs: TrainStep, sums: MicrobatchSums) -> tuple[StepSummary, dict[str, Any]]:
        """Return the summary and the metrics, the same on all hosts: the norm is of squares that all add up."""
        # By the exchange, whose programs are compiled ahead for other numbers of hosts.
        own = add_squares(self._mesh, jax.tree.leaves(sums.gradients))
        squares = math.fsum(self._exchange.gather(own))
        norm = np.float32(math.sqrt(squares))
        summary, metrics = programs.summarize(sums._replace(gradients=(norm,)))
        # On no device: the update, on all devices of the mesh, takes numbers as they are.
        return jax.tree.map(np.asarray, summary), metrics

    def shard(self, tree: Tree) -> Tree:
        """Return leaves on the mesh, and those that every host has replicated over it."""
        everywhere = NamedSharding(self._mesh, P())
        place = _have_nothing if self._is_left_over else replicate_over
        return jax.tree.map(
            lambda leaf: place(leaf, everywhere) if leaf.sharding.is_fully_replicated else leaf, tree
        )

    def shard_sums(self, sums: tuple[Any, Any], summary: StepSummary) -> tuple[tuple[Any, Any], StepSummary]:
        """Return the sums, with what is whole replicated over the mesh."""
        return self.shard(sums), summary

    def update(
        self, programs: TrainStep, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """Update each device's shards; a host that is left over has none."""
        return state if self._is_left_over else super().update(programs, state, sums, summary)

    def list_jobs(self, programs: TrainStep, known: set[MeshShape]) -> Iterator[CompilationJob]:
        """Yield a job for each likely number of replicas: the update of a state.

        What a replica runs stays the same.
        """
        world, shape = self.world, self.arrangement.replica_shape
        if not is_portable_cache_on(world.local_devices[0]):
            return
        known.add(self._mesh.axis_sizes)  # compiled by the first step
        for devices in list_likely_worlds(world.devices, world.spare_devices, world.host_index):
            # Here, and not on the thread that compiles: the members may change while it does.
            replicas = find_likely_replicas(LiveHosts.from_devices(devices, world.host_index), shape)
            if replicas is not None and replicas.mesh.axis_sizes not in known:
                yield CompilationJob(
                    f"state in shards on {replicas.mesh.devices.shape[0]} replicas",
                    functools.partial(self._compile, programs, known, replicas.mesh),
                )

    def _compile(
        self, programs: TrainStep, known: set[MeshShape], mesh: Mesh, check: CancellationCheck
    ) -> bool:
        compile_mesh_update(programs, self._placement.with_mesh(mesh), check)
        known.add(mesh.axis_sizes)
        return True


def _place(tree: Tree, placement: Placement) -> Tree:
    """Return the sharding of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: placement(jax.tree_util.keystr(path), leaf), tree
    )


def _have_nothing(leaf: Any, sharding: NamedSharding) -> jax.Array:  # noqa: ANN401 - an array or its shape
    """Return an array of which other hosts have the shards."""
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [], dtype=leaf.dtype)
