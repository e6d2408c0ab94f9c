"""How the training state is kept between steps: replicated on every host, or sharded over all of them.

Every generation makes a layout, for its mesh. A replicated state is on each host's own devices, where steps are
computed, so all conversions are identities. A sharded state is on a mesh over all live hosts; steps are computed with
replicated arrays on each host's own devices, which `gather` and `shard` convert.

A leaf of a sharded state that the update treats element by element is raveled (`sharding.raveled_array`): every device
has its share, whatever the number of hosts. Other leaves are sharded along a dim that the number of devices divides, if
there is one. Which leaves are raveled follows from the update alone, so it is the same in every generation.
"""

import abc
import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from resilient_jax.checkpoint.part_plan import HostPart, PartPlan, StoredState, describe_state
from resilient_jax.compile.ahead_of_time import CancellationCheck, CompilationJob
from resilient_jax.events import EventKind
from resilient_jax.sharding.placements import Placement, fully_sharded
from resilient_jax.sharding.raveled_array import ravel_leaves
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.step import resharding
from resilient_jax.step.assignment import DATA_AXIS
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.trainer.arrangement import Arrangement
from resilient_jax.trainer.fit_config import StateSharding
from resilient_jax.trainer.fit_result import TrainedModel, copy_to_numpy
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.parameter_ema import find_ema_params
from resilient_jax.trainer.train_step import RaveledLeaves, TrainStep, make_zeros
from resilient_jax.trainer.training_state import (
    EarlyStoppingState,
    MicrobatchSums,
    State,
    StepSummary,
    TrainingState,
    read_learning_rate,
)
from resilient_jax.worker.generation_info import make_mesh
from resilient_jax.worker.sharded_state import list_sharded_jobs, record_shard_sizes
from resilient_jax.worker.world import World

Tree = TypeVar("Tree")
SumMicrobatches = Callable[[Variables, int], tuple[tuple[Any, Any], StepSummary, dict[str, float]]]
"""Returns ((gradients, collections), summary) of all microbatches of a step, placed as the state is, and metrics."""

logger = logging.getLogger(__name__)

MAX_SHARD_IMBALANCE: Final = 1.5
"""A host that keeps more than this times its share of a sharded state is warned about."""
MIN_WARNED_BYTES: Final = 2**20
"""A state of less memory is not worth a warning."""
MeshShape = tuple[int, ...]
"""The sizes of a mesh's axes."""
COLLECTIVE_PATTERN: Final = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
"""A collective operation in the HLO text of a compiled program."""


class StateLayout(abc.ABC):
    """The operations of the loop on a state, however the state is kept.

    Attributes:
        arrangement: which replicas compute steps, and how parameters and sums are placed on this host's devices.
        placement: placement of the state's leaves between steps.
    """

    def __init__(self, world: World, placement: ShardingRule, arrangement: Arrangement) -> None:
        self.world = world
        self.arrangement = arrangement
        self.placement = placement
        self._part_plan: PartPlan | None = None

    @functools.cached_property
    def local_sharding(self) -> NamedSharding:
        """The sharding that replicates an array on this host's devices."""
        return NamedSharding(self.arrangement.placement.mesh, P())

    def restore(
        self, init: Callable[[], TrainingState], load: Callable[[ShardingRule], TrainingState | None]
    ) -> State:
        """Return the state to continue from: the committed one, else what `load` finds on storage, else `init()`.

        Args:
            init: as in `World.restore_or_init`.
            load: returns the state with this placement, or None if storage has none; not called if a state is
                committed.
        """
        if self.world.is_fresh and (found := load(self.placement)) is not None:
            return found
        return self.world.restore_or_init(init, sharding=self.placement)

    def ravel(self, state: TrainingState) -> TrainingState:
        """Return a complete state, or its abstract arrays, with those leaves raveled that are kept raveled."""
        return state

    @abc.abstractmethod
    def gather(self, tree: Tree) -> Tree:
        """Return a state's leaves replicated on this host's devices. Every host must call this.

        The result may share memory with the state, and is invalid once the state is donated.
        """

    def describe_stored(self, state: State) -> StoredState:
        """Return the state as checkpoints have it."""
        return describe_state(state)

    def make_checkpoint_part(self, state: State) -> HostPart:
        """Return what this host writes of a checkpoint, which is its share of what several hosts have."""
        stored, world = self.describe_stored(state), self.world
        if self._part_plan is None:
            self._part_plan = PartPlan(stored, world.host, world.host_of_device, world.hosts)
        return self._part_plan.make_part(stored.leaves)

    def gather_variables(self, state: State, *, use_ema: bool = False) -> Variables:
        """Return the variables of the whole model, as `gather` does.

        Args:
            use_ema: True: the average of the parameters in place of the parameters.
        """
        variables = state.variables
        if use_ema:
            variables = variables._replace(params=find_ema_params(state.opt_state))
        return self.gather(variables)

    def gather_result(self, state: State) -> TrainedModel:
        """Return what this host is to have of the trained model, in its memory. Every host must call this."""
        variables, ema_params = self.gather((state.variables, find_ema_params(state.opt_state)))
        return TrainedModel(copy_to_numpy(variables), copy_to_numpy(ema_params))

    def make_zeros(self, abstract: Tree) -> Tree:
        """Return zeros of what is summed over microbatches, placed as its sums."""
        return make_zeros(abstract, self.arrangement.placement)

    def summarize(self, programs: TrainStep, sums: MicrobatchSums) -> tuple[StepSummary, dict[str, Any]]:
        """Return the summary of a step's sums, and its metrics. Every host must call this."""
        return programs.summarize(sums)

    def read_step(self, state: State) -> int:
        """Return how many steps of a state are committed."""
        return int(state.step)

    def read_early_stopping(self, state: State) -> EarlyStoppingState:
        """Return the state of early stopping, in host memory. Every host must call this."""
        assert isinstance(state.early_stopping, EarlyStoppingState), "it is made together with early_stopping"
        return jax.device_get(state.early_stopping)

    def read_learning_rate(self, state: State) -> dict[str, float]:
        """Return the metric `learning_rate`; see `training_state.read_learning_rate`."""
        return read_learning_rate(state.opt_state)

    def step(
        self,
        programs: TrainStep,
        state: State,
        step: int,
        sum_microbatches: SumMicrobatches,
    ) -> tuple[State, dict[str, float]]:
        """Return the next state and the metrics of a step; donate this state."""
        sums, summary, metrics = sum_microbatches(state.variables, step)
        return self.update(programs, state, sums, summary), metrics

    @abc.abstractmethod
    def shard(self, tree: Tree) -> Tree:
        """Return leaves that every host has replicated, and that are not raveled, placed as the state is. No
        communication."""

    @abc.abstractmethod
    def shard_sums(self, sums: tuple[Any, Any], summary: StepSummary) -> tuple[tuple[Any, Any], StepSummary]:
        """Return what `update` takes, placed as the state's leaves are that it updates. No communication."""

    @abc.abstractmethod
    def update(self, programs: TrainStep, state: State, sums: tuple[Any, Any], summary: StepSummary) -> State:
        """Return the next state; donate this one. Sums and summary are placed as `shard_sums` places
        them."""

    def snapshot(self, state: State) -> None:
        """Protect a committed state against failures, if a snapshot is due."""
        self.world.snapshot(state)

    def list_jobs(self, programs: TrainStep, known: set[MeshShape]) -> Iterator[CompilationJob]:
        """Yield the jobs that compile what this layout would call in likely next worlds, the likeliest first.

        There are none where all programs are on this host's devices alone.

        Args:
            known: shapes of the meshes that programs were compiled for; the jobs add theirs.
        """
        yield from ()


class ReplicatedLayout(StateLayout):
    """Every host has all of the state, so that any one live host can continue."""

    def __init__(self, world: World, arrangement: Arrangement) -> None:
        super().__init__(world, arrangement.placement, arrangement)
        self._placement = arrangement.placement
        self._compute_sharding = _find_compute_sharding(self)

    def gather(self, tree: Tree) -> Tree:
        """Return the leaves, which are replicated; copied to devices that only compute."""
        where = self._compute_sharding
        if where is self.local_sharding:
            return tree
        return jax.tree.map(lambda leaf: resharding.replicate_over(leaf, where), tree)

    def shard(self, tree: Tree) -> Tree:
        """Return the leaves, which are placed right."""
        return tree

    def shard_sums(self, sums: tuple[Any, Any], summary: StepSummary) -> tuple[tuple[Any, Any], StepSummary]:
        """Return the sums, which are placed right."""
        return sums, summary

    def update(
        self, programs: TrainStep, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """Return the next state, computed on this host's devices, once the last snapshot's copy is finished."""
        self.world.wait_until_finished()
        return programs.update(state, sums, summary, placement=self._placement.with_abstract_mesh())

    def snapshot(self, state: TrainingState) -> None:
        """Do nothing: the other hosts have the state, and its snapshots are taken without a call."""


class InShards(StateLayout):
    """Every device has its shards of the state, and updates them; snapshots have those of a dead host."""

    def __init__(self, world: World, placement: Placement, arrangement: Arrangement) -> None:
        super().__init__(world, placement, arrangement)
        self._placement = placement
        self._update: Compiled | None = None

    def update(
        self, programs: TrainStep, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """Update each device's shards, once the last snapshot's copy is finished."""
        if self._update is None:
            placement = self._placement.with_abstract_mesh()
            self._update = programs.update.lower(state, sums, summary, placement=placement).compile()
            warn_of_collectives(self.world, self._update.as_text() or "", programs.why_mesh_bound)
        # The update donates the state, whose arrays the copy of a snapshot may still be reading.
        self.world.wait_until_finished()
        return self._update(state, sums, summary)


class ShardedLayout(InShards):
    """The state is in shards over all hosts."""

    def __init__(self, world: World, arrangement: Arrangement, raveled: RaveledLeaves) -> None:
        # Not `world.mesh`, which ends a rehearsal: what runs on this mesh waits for no other host.
        placement = fully_sharded(HostGrid(world.devices, world.host_index).mesh)
        super().__init__(world, placement, arrangement)
        self._raveled = raveled
        self._compute_sharding = _find_compute_sharding(self)

    def restore(
        self, init: Callable[[], TrainingState], load: Callable[[ShardingRule], TrainingState | None]
    ) -> TrainingState:
        """Return the state to continue from, and record how evenly it is sharded."""
        state = super().restore(lambda: self.ravel(init()), load)
        _watch_shard_sizes(self.world, state)
        return state

    def ravel(self, state: TrainingState) -> TrainingState:
        """Return the state with the leaves raveled that the update treats element by element."""
        return ravel_leaves(state, self._raveled.state)

    def gather(self, tree: Tree) -> Tree:
        """Return the leaves, gathered from all hosts."""
        return resharding.replicate_tree(tree, self._compute_sharding)

    def shard(self, tree: Tree) -> Tree:
        """Return the leaves as each device's shards."""
        return resharding.shard_tree(tree, self._placement)

    def shard_sums(self, sums: tuple[Any, Any], summary: StepSummary) -> tuple[tuple[Any, Any], StepSummary]:
        """Return the sums as each device's shards, raveled where the state is."""
        return resharding.shard_tree((sums, summary), self._placement, self._raveled.sums)

    def list_jobs(self, programs: TrainStep, known: set[MeshShape]) -> Iterator[CompilationJob]:
        """Return a job for each likely world: what gathers the state, cuts the sums, and updates."""
        known.add(self._placement.mesh.axis_sizes)  # compiled by the first step
        return list_sharded_jobs(self.world, known, functools.partial(self._compile, programs, known))

    def _compile(
        self,
        programs: TrainStep,
        known: set[MeshShape],
        grid: HostGrid,
        check: CancellationCheck,
    ) -> bool:
        placement = self._placement.with_mesh(grid.mesh)
        state = resharding.abstract_shards(programs.abstract_state, placement, self._raveled.state)
        resharding.compile_replicate(state.variables, grid, check)
        sums = programs.abstract_sums.gradients, programs.abstract_sums.collections
        complete = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=self.arrangement.placement(jax.tree_util.keystr(path), leaf),
            ),
            (sums, programs.abstract_summary),
        )
        resharding.compile_shard(complete, placement, self._raveled.sums, grid, check)
        cut = resharding.abstract_shards(complete, placement, self._raveled.sums)
        check()
        programs.update.lower(state, *cut, placement=placement.with_abstract_mesh()).compile()
        known.add(grid.mesh.axis_sizes)
        return True


def _find_compute_sharding(layout: StateLayout) -> NamedSharding:
    """Return the sharding that replicates an array on all devices of this host that compute microbatches.

    More than those of `local_sharding` where other hosts have fewer devices.
    """
    mesh, world = layout.arrangement.placement.mesh, layout.world
    # The replicas of a plan have shards, and each replica its own.
    if mesh.size == len(world.local_devices) or layout.arrangement.is_sharded_on_host:
        return layout.local_sharding
    return NamedSharding(make_mesh(world.local_devices, DATA_AXIS, f"host {world.host}"), P())


def make_state_layout(
    world: World, state_sharding: StateSharding | str, arrangement: Arrangement, programs: TrainStep
) -> StateLayout:
    """Return the layout of the state in this generation."""
    if state_sharding == StateSharding.SHARDED:
        return ShardedLayout(world, arrangement, programs.raveled_leaves)
    return ReplicatedLayout(world, arrangement)


def warn_of_collectives(world: World, update: str, why_mesh_bound: str) -> None:
    """Warn if the text of a compiled update of a sharded state has collectives."""
    if not (found := sorted(set(COLLECTIVE_PATTERN.findall(update)))):
        return
    world.record_event(EventKind.UPDATE_HAS_COLLECTIVES, collectives=", ".join(found))
    if world.host_index == 0:
        bits = (
            f" The weights are equal within rounding only, whichever hosts are alive: {why_mesh_bound}."
            if why_mesh_bound
            else ""
        )
        logger.warning(
            "the optimizer's update of a sharded state communicates between devices (%s): the committed state is "
            "lost on all hosts if one dies in the update, and they go back to the last snapshot.%s "
            "Element-wise optimizers, such as adamw, do not; clip with Numerics(clip_norm=)",
            ", ".join(found),
            bits,
        )


def _watch_shard_sizes(world: World, state: TrainingState) -> None:
    """Record how much of the state this host has, and warn where it is far more than its share."""
    sizes = record_shard_sizes(world, state)
    if world.host_index == 0 and sizes.bytes_here * len(world.hosts) > MAX_SHARD_IMBALANCE * max(
        sizes.bytes, MIN_WARNED_BYTES
    ):
        logger.warning(
            "the state is sharded over %d hosts, but each keeps %.0f %% of it: the optimizer, or a rule of "
            "variable_reductions, does not treat all leaves element by element, and such a leaf is sharded only along "
            "a dim that a number of devices divides. Choose sizes that many numbers of hosts divide, such as multiples "
            "of 24, or an element-wise optimizer, such as adamw; clip with Numerics(clip_norm=)",
            len(world.hosts),
            100 * sizes.bytes_here / sizes.bytes,
        )
