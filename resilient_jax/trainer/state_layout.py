"""How the training state is kept between steps: complete on every host, or sharded over all of them.

Made anew in every generation, for it knows the mesh. A complete state lies on each host's own devices, and nothing here
does anything. A sharded one lies on a mesh over all live hosts; what is computed in a step is complete, on each host's
own devices, and goes to and fro by `gather` and `cut`.
"""

import abc
import logging
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from resilient_jax.events import EventKind
from resilient_jax.sharding.placements import Placement, fully_sharded
from resilient_jax.state.flat_state import is_random_key
from resilient_jax.step import resharding
from resilient_jax.step.host_grid import HOST_AXIS, LOCAL_AXIS
from resilient_jax.trainer.arrangement import Arrangement
from resilient_jax.trainer.fit_config import StateSharding
from resilient_jax.trainer.step_programs import StepPrograms
from resilient_jax.trainer.training_state import StepSummary, TrainingState
from resilient_jax.worker.world import World

Tree = TypeVar("Tree")


logger = logging.getLogger(__name__)

COLLECTIVE_PATTERN: Final = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
"""In the text of a compiled program."""


class StateLayout(abc.ABC):
    """What the loop does with a state, whichever way it is kept.

    Attributes:
        arrangement: which replicas compute steps, and where parameters and totals lie on this host's devices.
        placement: where the state's leaves lie between steps.
    """

    def __init__(self, world: World, placement: Placement, arrangement: Arrangement) -> None:
        self.world = world
        self.arrangement = arrangement
        self.placement = placement

    @property
    def local_sharding(self) -> NamedSharding:
        """Whole on each of this host's devices."""
        return NamedSharding(self.arrangement.placement.mesh, P())

    def restore(
        self, init: Callable[[], TrainingState], load: Callable[[Placement], TrainingState | None]
    ) -> TrainingState:
        """The state to go on from: what was committed last, else what `load` finds on storage, else `init()`.

        Args:
            init: as for `World.restore_or_init`.
            load: gives the state where the placement lays it, or None; not called where something is committed.
        """
        if self.world.is_fresh and (found := load(self.placement)) is not None:
            return found
        return self.world.restore_or_init(init, sharding=self.placement)

    @abc.abstractmethod
    def gather(self, tree: Tree) -> Tree:
        """Complete copies of a state's leaves on this host's devices. Every host must call it.

        They may share memory with the state: gone when it is donated.
        """

    @abc.abstractmethod
    def shard(self, tree: Tree) -> Tree:
        """Leaves that every host has complete on its devices, as they lie in a state. Asks nobody."""

    @abc.abstractmethod
    def update(
        self, programs: StepPrograms, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """The next state; donates this one. Sums and summary lie as `cut` lays them."""

    @abc.abstractmethod
    def snapshot(self, state: TrainingState) -> None:
        """Does what else there is to do for a state that was committed, so that failures do not lose it."""


class ReplicatedLayout(StateLayout):
    """Every host has all of it, and is all that a failure may leave."""

    def __init__(self, world: World, arrangement: Arrangement) -> None:
        super().__init__(world, arrangement.placement, arrangement)

    def gather(self, tree: Tree) -> Tree:
        """It is complete here."""
        return tree

    def shard(self, tree: Tree) -> Tree:
        """It lies so."""
        return tree

    def update(
        self, programs: StepPrograms, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """On this host's devices."""
        return programs.update(state, sums, summary, placement=self.placement.with_abstract_mesh())

    def snapshot(self, state: TrainingState) -> None:
        """The other hosts have it."""


class ShardedLayout(StateLayout):
    """Every host has its share; snapshots hold what a dead host had."""

    def __init__(self, world: World, arrangement: Arrangement) -> None:
        mesh = world.mesh({HOST_AXIS: len(world.hosts), LOCAL_AXIS: -1})
        super().__init__(world, fully_sharded(mesh), arrangement)
        self._update: Compiled | None = None

    def restore(
        self, init: Callable[[], TrainingState], load: Callable[[Placement], TrainingState | None]
    ) -> TrainingState:
        """The state to go on from, and an event that says how evenly it could be cut."""
        state = super().restore(init, load)
        _record_shard_sizes(self.world, state)
        return state

    def gather(self, tree: Tree) -> Tree:
        """From all hosts."""
        return resharding.replicate_tree(tree, self.local_sharding)

    def shard(self, tree: Tree) -> Tree:
        """Each device takes its pieces."""
        return resharding.shard_tree(tree, self.placement)

    def update(
        self, programs: StepPrograms, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """Each device its pieces, when the last snapshot's copy is over."""
        if self._update is None:
            placement = self.placement.with_abstract_mesh()
            self._update = programs.update.lower(state, sums, summary, placement=placement).compile()
            self._warn_of_collectives(self._update.as_text() or "")
        self.world.wait_until_finished()
        return self._update(state, sums, summary)

    def _warn_of_collectives(self, update: str) -> None:
        if not (found := sorted(set(COLLECTIVE_PATTERN.findall(update)))):
            return
        self.world.record_event(EventKind.UPDATE_HAS_COLLECTIVES, collectives=", ".join(found))
        if self.world.host_index == 0:
            logger.warning(
                "the optimizer's update of a sharded state looks across devices (%s): what it adds up is added in an "
                "order that depends on the number of hosts, so the weights are equal within rounding only, and the "
                "committed state is lost on all hosts if one dies in the update: they go back to the last snapshot. "
                "Optimizers that treat every number by itself, such as adamw, do not; clip with Numerics(clip_norm=)",
                ", ".join(found),
            )

    def snapshot(self, state: TrainingState) -> None:
        """Takes a snapshot, if it is time for one."""
        self.world.snapshot(state)


def make_state_layout(
    world: World, state_sharding: StateSharding | str, arrangement: Arrangement
) -> StateLayout:
    """The state's keeping in this generation."""
    kind = ShardedLayout if state_sharding == StateSharding.SHARDED else ReplicatedLayout
    return kind(world, arrangement)


def _record_shard_sizes(world: World, state: TrainingState) -> None:
    """Says how much of the state this host has, and how much of that every host has: what could not be cut."""
    leaves = [jax.random.key_data(leaf) if is_random_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
    here = [_count_local_bytes(leaf) for leaf in leaves]
    world.record_event(
        EventKind.STATE_SHARDED,
        bytes=sum(leaf.nbytes for leaf in leaves),
        bytes_here=sum(here),
        bytes_everywhere=sum(own for own, leaf in zip(here, leaves, strict=True) if own == leaf.nbytes),
    )


def _count_local_bytes(leaf: jax.Array) -> int:
    """Of the different pieces of a leaf that this host has."""
    pieces = {
        tuple(cut.indices(size) for cut, size in zip(shard.index, leaf.shape, strict=True)): shard.data.nbytes
        for shard in leaf.addressable_shards
    }
    return sum(pieces.values())
