"""The training state of a model that is cut into blocks: by unit, and put together as that of the whole model.

A unit (`pipeline.state_units`) has its weights by name, and the optimizer's state of them: what the optimizer makes of
the user's parameters with all other leaves left out. So a leaf of that state has the path that it has in the state of
the whole model, where it is the same (a count), or stacked over layers as the parameters are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from resilient_jax.checkpoint.part_plan import LeafPlace
from resilient_jax.errors import CallerError
from resilient_jax.pipeline.block_state import UnitState
from resilient_jax.pipeline.state_units import StateUnit
from resilient_jax.sharding.elementwise import find_elementwise
from resilient_jax.sharding.jaxprs import CALLS, walk
from resilient_jax.state.leaf_kinds import make_strong
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.training_state import EarlyStoppingState, TrainingState, Tree
from resilient_jax.trainer.variable_tree import VariableTree


class PipelinedState(NamedTuple):
    """The state that a failure must not lose, of which each host has some units.

    Attributes:
        step: int32[]: how many steps are committed; on every host.
        units: all units of the model, by number; the arrays of a unit are on the hosts that hold it.
        early_stopping: state of early stopping, on every host; () without.
    """

    step: jax.Array
    units: tuple[UnitState, ...]
    early_stopping: EarlyStoppingState | tuple[()]


class UnitStates:
    """Converts between the state of a model and those of its units. Pure.

    Attributes:
        abstract: shapes of the state of each unit.
    """

    def __init__(
        self,
        units: Sequence[StateUnit],
        optimizer: optax.GradientTransformation,
        abstract_variables: Variables,
        abstract_opt_state: optax.OptState,
    ) -> None:
        """Trace the optimizer.

        Raises:
            CallerError: the optimizer does not treat the units separately.
        """
        self.units = tuple(units)
        self._optimizer = optimizer
        self._variables, self._opt_state = abstract_variables, abstract_opt_state
        self._tree = VariableTree(abstract_variables)
        self.abstract: tuple[UnitState, ...] = jax.eval_shape(
            lambda variables: tuple(self.init_unit(number, variables) for number in range(len(units))),
            abstract_variables,
        )
        self._users = self._list_users()
        self._check_separable()

    def init_unit(self, number: int, variables: Variables) -> UnitState:
        """Return the initial state of a unit, of the model's initial variables."""
        unit = self.units[number]
        weights = unit.table.split(self._tree.join(variables))
        own = {weight.name: weights[weight.name] for weight in unit.weights}
        return make_strong(UnitState(own, self._optimizer.init(unit.join(own))))

    def join(
        self,
        step: jax.Array | np.ndarray,
        states: Mapping[int, UnitState],
        early_stopping: Tree,
    ) -> TrainingState:
        """Return the state of the whole model, of those of all units, on one host."""
        weights = {name: value for state in states.values() for name, value in state.weights.items()}
        table = self.units[0].table
        found = {number: dict(_list_paths(state.opt_state)) for number, state in sorted(states.items())}

        def join_leaf(path: str, like: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401 - an array
            parts = [leaves[path] for leaves in found.values() if path in leaves]
            if parts[0].shape == like.shape:
                return parts[0]
            stack = np.concatenate if isinstance(parts[0], np.ndarray) else jnp.concatenate
            return stack(parts)

        leaves = [join_leaf(path, like) for path, like in _list_paths(self._opt_state)]
        return TrainingState(
            step=step,
            variables=self._tree.split(table.join(weights)),
            opt_state=jax.tree.structure(self._opt_state).unflatten(leaves),
            early_stopping=early_stopping,
        )

    def split(self, number: int, state: TrainingState) -> UnitState:
        """Return the state of a unit, of that of the whole model; leaves that other units have may be None.

        No two units have the same array.
        """
        unit = self.units[number]
        leaves = unit.table.treedef.flatten_up_to(self._tree.join(state.variables))
        own = {
            weight.name: leaves[weight.leaf] if weight.layer is None else leaves[weight.leaf][weight.layer]
            for weight in unit.weights
        }
        layers = sorted({weight.layer for weight in unit.weights if weight.layer is not None})
        paths = [path for path, _ in _list_paths(self._opt_state)]
        found = dict(
            zip(paths, jax.tree.structure(self._opt_state).flatten_up_to(state.opt_state), strict=True)
        )

        def take(path: str, like: jax.ShapeDtypeStruct) -> Any:  # noqa: ANN401 - an array
            if found[path].shape != like.shape:
                return found[path][np.array(layers)]
            # A count is in each unit: of its own, because an update donates the arrays of one unit after the other.
            is_common = len(self.find_units_of_leaf(f".opt_state{path}")) != 1
            return found[path].copy() if is_common else found[path]

        opt_leaves = [take(path, like) for path, like in _list_paths(self.abstract[number].opt_state)]
        return UnitState(own, jax.tree.structure(self.abstract[number].opt_state).unflatten(opt_leaves))

    def list_places(self, number: int) -> Iterator[tuple[str, LeafPlace]]:
        """Yield where the leaves of a unit's state are in the state of the whole model; the inverse of `split`.

        What every unit has alike is that of the first one.

        Yields:
            The path of a leaf of the unit's state, and its place in a `TrainingState`.
        """
        unit = self.units[number]
        names = [path for path, _ in _list_paths(self._variables)]
        for weight in unit.weights:
            path = jax.tree_util.keystr((jax.tree_util.DictKey(weight.name),))
            rows = (weight.layer,) if weight.layer is not None else None
            yield f".weights{path}", LeafPlace(f".variables{names[weight.leaf]}", rows, rows is not None)
        layers = tuple(sorted({weight.layer for weight in unit.weights if weight.layer is not None}))
        shapes = {path: leaf.shape for path, leaf in _list_paths(self._opt_state)}
        for path, leaf in _list_paths(self.abstract[number].opt_state):
            name = f".opt_state{path}"
            if number == 0 or self.find_units_of_leaf(name):
                yield name, LeafPlace(name, layers if leaf.shape != shapes[path] else None)

    def find_units_of_leaf(self, path: str) -> list[int]:
        """Return the units that have a part of a leaf of a `TrainingState`; none: every host has it."""
        return self._users.get(path, [])

    def list_block_bytes(self, num_blocks: int) -> list[float]:
        """Return the bytes of the state of each block; what blocks share counts in each of them."""
        found = [0.0] * num_blocks
        for unit, state in zip(self.units, self.abstract, strict=True):
            nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
            for block in unit.blocks:
                found[block] += nbytes
        return found

    def _check_separable(self) -> None:
        """Refuse an optimizer whose state, or update, of one unit is not that within the whole model."""
        whole = dict(_list_paths(self._opt_state))
        found: dict[str, list[tuple[int, ...]]] = {}
        for state in self.abstract:
            for path, leaf in _list_paths(state.opt_state):
                found.setdefault(path, []).append(leaf.shape)
        for path in whole.keys() | found.keys():
            shapes = found.get(path, [])
            is_same = path in whole and whole[path].shape in shapes
            is_stacked = path in whole and bool(shapes) and all(shapes)
            is_stacked = is_stacked and sum(shape[0] for shape in shapes) == whole[path].shape[0]
            if not (is_same or is_stacked):
                raise CallerError(
                    f"optimizer: found that its state has a leaf {path} that is not that of one block alone, expected "
                    "an optimizer that treats each layer by itself, such as adamw"
                )
        self._check_update()

    def _list_users(self) -> dict[str, list[int]]:
        """Return the units of each leaf of a `TrainingState` that not all of them have alike, by its path."""
        users: dict[str, list[int]] = {}
        names = [f".variables{path}" for path, _ in _list_paths(self._variables)]
        whole = dict(_list_paths(self._opt_state))
        for number, (unit, state) in enumerate(zip(self.units, self.abstract, strict=True)):
            own = [names[leaf] for leaf in {weight.leaf for weight in unit.weights}]
            own += [f".opt_state{path}" for path, leaf in _list_paths(state.opt_state) if path in whole]
            for path in own:
                users.setdefault(path, []).append(number)
        # A count, which all have.
        return {path: found for path, found in users.items() if len(found) < len(self.units)}

    def _check_update(self) -> None:
        """Refuse an optimizer that computes the update of a unit from the gradients of another.

        A leaf that is stacked over layers is in several units, so of that each element must be updated by itself: a
        norm of the leaf, as of LAMB, would be one of a layer here.
        """
        optimizer = optax.with_extra_args_support(self._optimizer)
        value, params = jax.ShapeDtypeStruct((), jnp.float32), self._variables.params
        closed = jax.make_jaxpr(
            lambda grads, state, params, value: optimizer.update(grads, state, params, value=value)[0]
        )(params, self._opt_state, params, value)
        owners: dict[int, set[int]] = {}
        for number, unit in enumerate(self.units):
            for weight in unit.weights:
                if weight.is_trained:
                    owners.setdefault(weight.leaf, set()).add(number)
        names = [path for path, _ in _list_paths(params)]
        for leaf, used in enumerate(_list_dependencies(closed.jaxpr, len(names))):
            other = next(
                (one for one in sorted(used) if owners.get(one, set()) - owners.get(leaf, set())), None
            )
            if other is not None:
                raise CallerError(
                    f"optimizer: found that the update of {names[leaf]} depends on the gradient of {names[other]}, "
                    "which another host may have; expected an optimizer that treats each layer by itself, such as "
                    "adamw. To clip, use Numerics(clip_norm=)"
                )
        is_elementwise = find_elementwise(closed, [(leaf, leaf) for leaf in range(len(names))])
        for leaf, used in owners.items():
            if len(used) > 1 and self._is_stacked(leaf) and not is_elementwise[leaf]:
                raise CallerError(
                    f"optimizer: found that it does not treat {names[leaf]} element by element, expected so of "
                    "parameters stacked over layers (by a scan), since a host has those of some layers: take an "
                    "optimizer such as adamw, or a list of layers instead of the scan"
                )

    def _is_stacked(self, leaf: int) -> bool:
        """Return whether a leaf of the parameters has those of several layers."""
        return any(
            weight.leaf == leaf and weight.layer is not None for unit in self.units for weight in unit.weights
        )


def _list_paths(tree: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _list_dependencies(jaxpr: core.Jaxpr, num_gradients: int) -> list[set[int]]:
    """Return for each output which of the first inputs it is computed from; an equation uses all of its inputs."""
    inputs = [{number} if number < num_gradients else set[int]() for number in range(len(jaxpr.invars))]

    def apply(equation: core.JaxprEqn, operands: tuple[set[int], ...]) -> Sequence[set[int]]:
        return [set[int]().union(*operands)] * len(equation.outvars)

    # Optimizers have functions that are jitted over all of their leaves.
    return walk(jaxpr, inputs, apply, read_constant=lambda *_: set[int](), enters=CALLS)
