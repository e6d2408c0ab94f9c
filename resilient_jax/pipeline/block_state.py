"""Weights and optimizer state of the units that one host holds, and their update.

Each unit has `optimizer.init` of the user's tree with all other leaves left out, so masks and labels by path work; an
optimizer that looks across leaves (a global norm) sees one unit only. Gradients are clipped by `max_norm`: the norm is
added up unit by unit, so it does not depend on which host holds what.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.model_weights import list_leaf_specs
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.state_units import StateUnit
from resilient_jax.program_analysis.program_digest import describe_program
from resilient_jax.sharding.exact_reductions import apply_exactly, find_inexact
from resilient_jax.sharding.placements import ParameterPlacement
from resilient_jax.sharding.stage_sharding import StageSharding
from resilient_jax.state.leaf_kinds import make_strong

ReduceVariable = Callable[[str, Any, Any, Any], Any]
"""`reduce(name, old, total, count)` returns the new value of a variable that is not trained, from the committed one and
the sum of what `count` microbatches make of it; traced."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitState:
    """The state of a unit.

    Attributes:
        weights: values by name, also those of variables that are not trained.
        opt_state: what the optimizer keeps for the unit's trained weights.
    """

    weights: Mapping[str, Any]
    opt_state: optax.OptState


class BlockState:
    """The state of the units of one host.

    Attributes:
        units: all units of the model, by number; also units that are not here.
        states: unit number to state, of the units that are here and that an update changes.
        after_unit: called with the number of each unit when an update has made its next state.
    """

    def __init__(
        self,
        units: Sequence[StateUnit],
        optimizer: optax.GradientTransformation,
        sharding: StageSharding | None = None,
        reduce_variable: ReduceVariable | None = None,
        *,
        num_microbatches: int,
        max_norm: float | None = None,
        donate: bool = False,
    ) -> None:
        """Have no unit.

        Args:
            units: all units of the model; a unit's number is its index.
            optimizer: transformation that is given one unit at a time.
            sharding: layout over the devices of a host, on an abstract mesh; None: all arrays are on a single device.
            reduce_variable: rule for variables that the loss changes; None: the loss changes none.
            num_microbatches: how many microbatches the sums of a step are over.
            max_norm: norm to which gradients are scaled down; None: gradients are used as they are.
            donate: whether an update takes the memory of the state before: at most one unit is then in memory twice.
        """
        self.units = units
        self._donate = donate
        self._count, self._max_norm = np.float32(num_microbatches), np.float32(max_norm or np.inf)
        self._reduce_variable = reduce_variable
        self._sharding = sharding
        self.states: dict[int, UnitState] = {}
        self.after_unit: Callable[[int], None] = lambda number: None
        self._units_until_commit: dict[int, UnitState] = {}
        """Those that were here before the last change, also those that leave: what was begun with their weights is
        finished with them, by whichever host."""
        self._optimizer = optax.with_extra_args_support(optimizer)
        self._updates: dict[int, tuple[Any, Any]] = {}
        """Program and structure of the result, by unit."""
        self._programs: dict[tuple[Any, ...], Any] = {}
        """By what they compute."""

    def replace(self, states: Mapping[int, UnitState]) -> None:
        """Replace the units that are here by others, maybe of another step; by number."""
        self._units_until_commit, self.states = {}, dict(states)

    def hold(self, states: Mapping[int, UnitState]) -> None:
        """Hold these units of the same step from now on, by number; others are kept until it is committed.

        Until then a host may be given tasks of theirs, or need them, because it has not received them yet.
        """
        # Of a unit that it holds from now on, too, nothing else is needed.
        until = {number: state for number, state in self.all_states.items() if number not in states}
        self._units_until_commit, self.states = until, dict(states)

    def move_to_host(self) -> None:
        """Copy the units to host memory, where they outlive the devices."""
        self._change_all(lambda number, state: jax.tree.map(np.array, state))

    def place(self, sharding: StageSharding) -> None:
        """Have the units on the devices of this host again."""
        self._change_all(lambda number, state: place_unit(self.units[number], state, sharding))

    def _change_all(self, change: Callable[[int, UnitState], UnitState]) -> None:
        until = self._units_until_commit
        self._units_until_commit = {number: change(number, state) for number, state in until.items()}
        self.states = {number: change(number, state) for number, state in self.states.items()}

    @property
    def all_states(self) -> dict[int, UnitState]:
        """All units that are here, by number; also those that leave when the step under way is committed."""
        return {**self._units_until_commit, **self.states}

    def list_complete_blocks(self) -> tuple[int, ...]:
        """Return the blocks of which all weights are here, ascending."""
        return list_complete_blocks(self.units, self.all_states)

    def list_weights(self, block: int) -> dict[str, Any]:
        """Return the weights of a block, by name, from all units that have some."""
        return {
            name: value
            for number, state in self.all_states.items()
            if block in self.units[number].blocks
            for name, value in state.weights.items()
        }

    def update(self, sums: Mapping[int, Mapping[str, Any]], table: CommitTable) -> None:
        """Update every unit that is here with the mean of its gradients.

        If the state is donated and a program fails, no unit is left: some would be of this step, some of the next.

        Args:
            sums: by unit number and name, for every unit in `states`: sums of gradients, and of what microbatches make
                of variables that the loss changes.
            table: what follows from the sums of the whole model.
        """
        found: dict[int, UnitState] = {}
        try:
            # Also those without weights of their own: what counts steps in them is that of the whole model.
            for number, state in self.states.items():
                found[number] = self.make_next(number, state, sums[number], table)
                self.after_unit(number)
        except BaseException:
            if self._donate:
                self.replace({})
            raise
        self.states.update(found)
        self._units_until_commit = {}

    def make_next(
        self, number: int, state: UnitState, sums: Mapping[str, Any], table: CommitTable
    ) -> UnitState:
        """Return the state of a unit after a step, whether it is one of those here or a copy; see `update`.

        The state that is given is donated if this one donates.
        """
        norm, loss, divisor = map(np.float32, (table.norm, table.loss, table.divisor))
        numbers = self._count, divisor, norm, self._max_norm, loss
        # Awaited: two programs with collectives on the same devices must not be in flight together.
        return jax.block_until_ready(self._update_unit(number, (state, dict(sums), numbers)))

    def _update_unit(self, number: int, arguments: tuple[Any, ...]) -> UnitState:
        """Return the next state of a unit. Units that compute the same, as equal layers do, share one program."""
        if number not in self._updates:
            update = functools.partial(
                _update_unit, self.units[number], self._optimizer, self._reduce_variable
            )
            closed, after = jax.make_jaxpr(update, return_shape=True)(*arguments)
            shardings: tuple[NamedSharding, ...] = ()
            if self._sharding is not None:
                specs = make_unit_specs(self.units[number], arguments[0], self._sharding)
                shardings = tuple(map(self._sharding.shard, jax.tree.leaves(specs, is_leaf=is_spec)))
            kind = describe_program(closed).digest, *map(str, closed.in_avals), shardings
            donated = range(1, 1 + len(jax.tree.leaves(arguments[0]))) if self._donate else ()
            run = functools.partial(_run, closed, shardings, find_inexact(closed) is None)
            program = self._programs.setdefault(kind, jax.jit(run, donate_argnums=tuple(donated)))
            self._updates[number] = program, jax.tree.structure(after)
        program, structure = self._updates[number]
        return structure.unflatten(program(np.int32(0), *jax.tree.leaves(arguments)))


def make_unit_specs(unit: StateUnit, state: UnitState, sharding: StageSharding) -> UnitState:
    """Return the spec of each array of a unit's state: of the optimizer's state those of the weights that it is of.

    Args:
        state: arrays or their shapes.
        sharding: layout over the devices of a host.
    """
    weights = [weight for weight in unit.weights if weight.is_trained]
    placement = ParameterPlacement(
        sharding.mesh, list_leaf_specs(unit.params_table, weights, sharding.find_weight_spec)
    )
    return UnitState(
        {name: sharding.find_weight_spec(name) for name in state.weights},
        jax.tree_util.tree_map_with_path(
            lambda path, leaf: placement.partition_spec(jax.tree_util.keystr(path), leaf), state.opt_state
        ),
    )


def is_spec(node: object) -> bool:
    """Return whether this is a spec, for walking trees of them."""
    return isinstance(node, P)


def place_unit(unit: StateUnit, state: UnitState, sharding: StageSharding) -> UnitState:
    """Return the state of a unit on the devices of a host, as its programs take it."""
    specs = make_unit_specs(unit, state, sharding)
    return jax.tree.map(
        lambda spec, leaf: jax.device_put(leaf, sharding.place(spec)), specs, state, is_leaf=is_spec
    )


def place_sums(unit: StateUnit, sums: Mapping[str, Any], sharding: StageSharding) -> dict[str, jax.Array]:
    """Return sums of a unit on the devices of a host: of gradients as the weights are, of variables on all of them."""
    trained = set(unit.trained_names)
    return {
        name: jax.device_put(
            value, sharding.place(sharding.find_weight_spec(name) if name in trained else P())
        )
        for name, value in sums.items()
    }


def describe_sums(
    unit: StateUnit, changed: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the sums of a unit, sorted by name; sums of floats have 32 bits at least.

    Args:
        changed: variable name to the shape that one microbatch gives, for each variable that the loss changes.
    """
    found = {weight.name: weight.describe() for weight in unit.weights if weight.is_trained}
    found |= {weight.name: changed[weight.name] for weight in unit.weights if weight.name in changed}
    return {
        name: jax.ShapeDtypeStruct(shape.shape, jnp.promote_types(shape.dtype, np.float32))
        if jnp.issubdtype(shape.dtype, jnp.inexact)
        else jax.ShapeDtypeStruct(shape.shape, shape.dtype)
        for name, shape in sorted(found.items())
    }


def _run(
    closed: core.ClosedJaxpr,
    shardings: Sequence[NamedSharding],
    is_exact: bool,
    zero: jax.Array,
    *arguments: Any,  # noqa: ANN401 - arrays
) -> list[Any]:
    """Run a traced update; without shardings on a single device. `zero` is 0, and the compiler cannot know that."""
    found = apply_exactly(closed, arguments, zero) if is_exact else core.jaxpr_as_fun(closed)(*arguments)
    if not shardings:
        return found
    return [
        jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(found, shardings, strict=True)
    ]


def list_complete_blocks(units: Sequence[StateUnit], here: Collection[int]) -> tuple[int, ...]:
    """Return the blocks of which a host with some units has all weights, ascending."""
    missing = {block for number, unit in enumerate(units) if number not in here for block in unit.blocks}
    return tuple(sorted({block for unit in units for block in unit.blocks} - missing))


def _update_unit(
    unit: StateUnit,
    optimizer: optax.GradientTransformationExtraArgs,
    reduce_variable: ReduceVariable | None,
    state: UnitState,
    sums: dict[str, jax.Array],
    numbers: tuple[Any, Any, Any, Any, Any],
) -> UnitState:
    count, divisor, norm, max_norm, loss = numbers

    def make_gradient(name: str) -> jax.Array:
        mean = sums[name] / divisor
        clipped = jnp.where(norm < max_norm, mean, mean / norm * max_norm)
        # Sums are in float32 at least; the optimizer gets gradients in the dtypes of the weights.
        return clipped.astype(state.weights[name].dtype)

    params = unit.join(state.weights)
    gradients = unit.join({name: make_gradient(name) for name in unit.trained_names})
    updates, opt_state = optimizer.update(gradients, state.opt_state, params, value=loss)
    trained = unit.split(optax.apply_updates(params, updates))
    changed = {}
    for name in sums.keys() - set(unit.trained_names):
        assert reduce_variable is not None, "the loss changes variables"
        changed[name] = reduce_variable(name, state.weights[name], sums[name], count)
    return make_strong(UnitState({**state.weights, **trained, **changed}, opt_state))


jax.tree_util.register_dataclass(UnitState, data_fields=("weights", "opt_state"), meta_fields=())
