"""The state of a loop of one's own, sharded in flat ranges: each host keeps its share, whatever the number of hosts.

Between steps an array of 64 elements or more is *raveled* (`sharding.raveled_array`): a vector in C order, of which
each device has an equal range. A step computes with complete arrays:

    gather    ranges of all hosts -> complete arrays on this host's devices     one all-gather for each dtype
    update    ranges of the state, complete gradients -> ranges of the next     no communication

The user's update is traced with the arrays' own shapes. What it treats element by element (`sharding.elementwise`) is
computed on each device's ranges. An array that meets another operation is gathered, updated complete on every host, and
cut again: the bits do not depend on the number of hosts, whatever the update does.
"""

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.argument_checks import describe_value
from resilient_jax.compile.ahead_of_time import CancellationCheck, CompilationJob
from resilient_jax.errors import CallerError
from resilient_jax.events import EventKind
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.sharding.elementwise import apply_elementwise, find_elementwise, ravel_like
from resilient_jax.sharding.exact_reductions import apply_exactly, find_inexact
from resilient_jax.sharding.placements import Placement, RaveledPlacement, constrain_sharding
from resilient_jax.sharding.raveled_array import (
    MAX_RAVELED_SIZE,
    MIN_RAVELED_SIZE,
    is_raveled,
    ravel_leaves,
)
from resilient_jax.state.flat_state import make_abstract_state
from resilient_jax.state.leaf_kinds import is_random_key, make_strong
from resilient_jax.state.shard_sizes import ShardSizes, measure_shards
from resilient_jax.step import resharding
from resilient_jax.step.host_grid import LOCAL_AXIS, HostGrid
from resilient_jax.step.likely_worlds import list_likely_worlds
from resilient_jax.worker.generation_info import make_mesh
from resilient_jax.worker.world import World

Tree = Any
"""A pytree of arrays."""
Shapes = tuple[tuple[tuple[int, ...], Any], ...]
"""Shape and dtype of each leaf."""
ZERO: Final = np.int32(0)
"""An argument, so that the compiler does not know what it is."""
MAX_UPDATES: Final = 16
"""Updates whose programs are kept: a script has one or two; one that makes a new function in each step drops old."""


class ShardedState:
    """A state that is sharded in flat ranges: each host keeps its share, whatever the number of hosts.

    Make one in `train`, before the loop. With 4, 3 or 2 hosts each has a fourth, a third or half of the state in memory
    between steps, with the same bits on any number of hosts. The trees have an `rj.RaveledArray` in place of most
    arrays. They are what `World.commit` and `World.snapshot` take; such a state outlives a host by `snapshot` alone.

    Args:
        world: world of this generation.
        init_fn: makes the initial state, a pytree of arrays; as for `World.restore_or_init`. Numbers, NumPy's arrays
            and weakly typed arrays become strongly typed JAX arrays: programs are compiled ahead by dtypes alone.

    Example:
        >>> def train(world):
        ...     sharded = rj.ShardedState(world, init_state)
        ...     state = sharded.restore_or_init()
        ...     for step in world.steps(1000):
        ...         loss, gradients = value_and_grad(sharded.gather(state.params))
        ...         state = sharded.update(apply, state, gradients)
        ...         world.commit(state, loss=loss)
        ...         world.snapshot(state)
    """

    def __init__(self, world: World, init_fn: Callable[[], Any]) -> None:
        self._world, self._init_fn = world, init_fn
        # Not `world.mesh`, which ends a rehearsal: what runs on this mesh waits for no other host.
        self._placement = RaveledPlacement(HostGrid(world.devices, world.host_index).mesh)
        self._local = NamedSharding(make_mesh(world.local_devices, LOCAL_AXIS, "this host"), P())
        self._gathered: dict[object, Tree] = {}
        """The shapes of what was gathered in this generation, each tree once."""
        self._num_updates = 0

    def restore_or_init(self) -> Any:  # noqa: ANN401 - the user's tree
        """Return the state that was committed last, else the initial one; see `World.restore_or_init`.

        Raises:
            CallerError: a leaf of the state cannot be sharded.
            StateError: as `World.restore_or_init`, or a leaf in host memory would lose half of its bits.
        """
        abstract = make_abstract_state(self._init_fn)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
            _check_leaf(jax.tree_util.keystr(path), leaf)
        raveled = _list_raveled(abstract)
        state = self._world.restore_or_init(
            lambda: ravel_leaves(make_strong(self._init_fn()), raveled), sharding=self._placement
        )
        record_shard_sizes(self._world, state)
        return state

    def gather(self, tree: Any) -> Any:  # noqa: ANN401 - a tree
        """Return a state, or a part of it, as complete arrays, replicated over this host's devices.

        Every live host must call it, with the same part.
        """
        abstract = _make_abstract(tree)
        self._gathered.setdefault(_describe(abstract), abstract)
        return resharding.replicate_tree(tree, self._local)

    def update(self, update_fn: Callable[..., Any], state: Any, *args: Any) -> Any:  # noqa: ANN401 - trees
        """Return `update_fn(state, *args)`, computed on each device's ranges.

        The state is donated: its arrays are gone afterwards. Every live host must call it.

        Args:
            update_fn: a pure function that returns a tree like the state. The function is traced with complete arrays.
                Define the function outside of `train`: a new function is traced and compiled anew.
            state: as `restore_or_init` or this method returned it.
            args: trees of complete arrays on this host's devices, the same on every host: gradients, as
                `value_and_grad` gives them for gathered parameters.

        Raises:
            CallerError: the update returns another tree, or an argument is no array of this host.
        """
        _check_args(args)
        abstract = _make_abstract((state, args))
        program = _find_program(update_fn, *_describe(abstract))
        args = resharding.shard_tree(jax.device_put(args, self._local), self._placement, program.args)
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_raveled)
        whole = [place for place, leaf in enumerate(leaves) if is_raveled(leaf) and not program.state[place]]
        _replace(leaves, whole, lambda found: resharding.shard_tree(self.gather(found), self._placement))
        # The program donates the state, whose arrays the copy of a snapshot may still be reading.
        self._world.wait_until_finished()
        placement = self._placement.with_abstract_mesh()
        new = program.run(treedef.unflatten(leaves), args, ZERO, placement=placement)
        leaves = treedef.flatten_up_to(new)
        _replace(leaves, whole, self._ravel)
        self._num_updates += 1
        if self._num_updates == 2:  # behind the reductions, which the end of the first step enqueues
            gathered = list(self._gathered.values())
            compile_for_grid = functools.partial(program.compile_for_grid, abstract, gathered, self._local)
            jobs = list_sharded_jobs(self._world, {self._placement.mesh.axis_sizes}, compile_for_grid)
            self._world.step_services.compile_ahead(jobs)
        return treedef.unflatten(leaves)

    def _ravel(self, found: list[Any]) -> list[Any]:
        """Return arrays that every device has, raveled."""
        complete = resharding.replicate_tree(found, self._local)
        return resharding.shard_tree(complete, self._placement, [True] * len(found))


def record_shard_sizes(world: World, state: Tree) -> ShardSizes:
    """Record how much of a state this host has, and return it."""
    sizes = measure_shards(state)
    world.record_event(
        EventKind.STATE_SHARDED,
        bytes=sizes.bytes,
        bytes_here=sizes.bytes_here,
        bytes_everywhere=sizes.bytes_everywhere,
    )
    return sizes


def list_sharded_jobs(
    world: World,
    known: Container[tuple[int, ...]],
    compile_for_grid: Callable[[HostGrid, CancellationCheck], bool],
) -> Iterator[CompilationJob]:
    """Yield a job for each likely world, whose hosts have a state in shards.

    Args:
        known: shapes of the meshes that programs were compiled for.
        compile_for_grid: compiles the programs for the hosts of a world.
    """
    if not is_portable_cache_on(world.local_devices[0]):
        return
    for devices in list_likely_worlds(world.devices, world.spare_devices, world.host_index):
        # Here, and not on the thread that compiles: the members may change while it does.
        grid = HostGrid(devices, world.host_index)
        # Of hosts with different numbers of devices some devices would be in no row of the grid.
        if grid.mesh.axis_sizes not in known and grid.mesh.size == len(devices):
            yield CompilationJob(
                f"sharded state over {grid.num_hosts} hosts", functools.partial(compile_for_grid, grid)
            )


class _Program(NamedTuple):
    """An update of a state and arguments of certain shapes.

    Attributes:
        run: `run(state, args, zero, placement=)` returns the next state; jitted, and donates the state.
        state: whether each leaf of the state is updated as ranges.
        args: whether each leaf of the arguments is used as ranges.
    """

    run: Any
    state: tuple[bool, ...]
    args: tuple[bool, ...]

    def compile_for_grid(
        self,
        abstract: tuple[Tree, Tree],
        gathered: Sequence[Tree],
        local: NamedSharding,
        grid: HostGrid,
        check: CancellationCheck,
    ) -> bool:
        """Compile, for the persistent cache, what a step needs over other hosts.

        Args:
            abstract: shapes and dtypes of the state and the arguments.
            gathered: shapes and dtypes of the trees that a step gathers.
            local: sharding of complete arrays.
            check: raises if compiling is to end.
        """
        placement = RaveledPlacement(grid.mesh)
        for tree in gathered:
            shards = resharding.abstract_shards(tree, placement, _list_raveled(tree))
            resharding.compile_replicate(shards, grid, check)
        state, args = abstract
        complete = _place_abstract(args, local)
        resharding.compile_shard(complete, placement, self.args, grid, check)
        whole = [
            leaf
            for leaf, kept, used in zip(jax.tree.leaves(state), _list_raveled(state), self.state, strict=True)
            if kept and not used
        ]
        resharding.compile_shard(_place_abstract(whole, local), placement, [True] * len(whole), grid, check)
        check()
        self.run.lower(
            resharding.abstract_shards(state, placement, self.state),
            resharding.abstract_shards(args, placement, self.args),
            ZERO,
            placement=placement.with_abstract_mesh(),
        ).compile()
        return True


@functools.lru_cache(MAX_UPDATES)
def _find_program(update_fn: Callable[..., Tree], structure: Any, shapes: Shapes) -> _Program:  # noqa: ANN401 - a PyTreeDef
    state, args = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    closed, after = _trace(update_fn, state, args)
    _check_result(state, after)
    count = len(jax.tree.leaves(state))
    _, *elementwise = find_elementwise(closed, [(1 + place, place) for place in range(count)])
    raveled = tuple(one and kept for one, kept in zip(elementwise, _list_raveled((state, args)), strict=True))

    @functools.partial(jax.jit, static_argnames="placement", donate_argnums=0)
    def run(state: Tree, args: Tree, zero: jax.Array, *, placement: Placement) -> Tree:
        # Traced again, and not kept: constants in the trace would be arrays of a generation.
        closed, _ = _trace(update_fn, *_make_abstract((state, args)))
        arguments = jax.tree.leaves((state, args), is_leaf=is_raveled)
        results = apply_elementwise(closed, [zero, *arguments])
        new = jax.tree.structure(state, is_leaf=is_raveled).unflatten(
            [ravel_like(leaf, before) for leaf, before in zip(results, arguments, strict=False)]
        )
        return constrain_sharding(make_strong(new), placement)

    return _Program(run, raveled[:count], raveled[count:])


def _trace(
    update_fn: Callable[..., Tree], state: Tree, args: tuple[Tree, ...]
) -> tuple[core.ClosedJaxpr, Tree]:
    """Return the program of an update, with `zero` as its first argument, and its result in shapes.

    It is rounded at the same places on any number of devices, where that is possible.
    """
    closed, after = jax.make_jaxpr(update_fn, return_shape=True)(state, *args)
    leaves = jax.tree.leaves((state, args))

    def update(zero: jax.Array, *arguments: jax.Array) -> list[Any]:
        if find_inexact(closed) is None:
            return apply_exactly(closed, arguments, zero)
        return core.jaxpr_as_fun(closed)(*arguments)

    return jax.make_jaxpr(update)(ZERO, *leaves), after


def _list_raveled(abstract: Tree) -> list[bool]:
    """Return of each leaf whether it is kept as ranges."""
    return [leaf.size >= MIN_RAVELED_SIZE and not is_random_key(leaf) for leaf in jax.tree.leaves(abstract)]


def _make_abstract(tree: Tree) -> Tree:
    """Return shapes and dtypes of the arrays that a tree represents, raveled or not."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree, is_leaf=is_raveled)


def _place_abstract(tree: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _describe(abstract: Tree) -> tuple[Any, Shapes]:
    leaves, structure = jax.tree.flatten(abstract)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _replace(leaves: list[Any], places: Sequence[int], convert: Callable[[list[Any]], list[Any]]) -> None:
    """Replace leaves by what `convert` makes of all of them."""
    if places:
        for place, leaf in zip(places, convert([leaves[place] for place in places]), strict=True):
            leaves[place] = leaf


def _check_leaf(path: str, leaf: Any) -> None:  # noqa: ANN401 - an abstract array, or anything else
    if isinstance(leaf, str):
        raise CallerError(
            f"ShardedState: found the string {leaf!r} at {path}, expected arrays alone. Keep it outside of the state"
        )
    if leaf.size > MAX_RAVELED_SIZE:
        raise CallerError(
            f"ShardedState: found an array of {leaf.size} elements at {path}, expected {MAX_RAVELED_SIZE} at most. "
            "Make it several arrays, or shard it by a rule: world.restore_or_init(init, sharding=rule)"
        )


def _check_args(args: Tree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            found = leaf.sharding if isinstance(leaf, jax.Array) else describe_value(leaf)
            raise CallerError(
                f"update: found {found} at args{jax.tree_util.keystr(path)}, expected an array on this host's devices, "
                "the same on every host, such as the gradients of value_and_grad"
            )


def _check_result(state: Tree, after: Tree) -> None:
    before, found = _describe(state), _describe(_make_abstract(after))
    if before[0] != found[0]:
        raise CallerError(
            f"update: found a result of the structure {found[0]}, expected the state's: {before[0]}"
        )
    for (path, leaf), shape in zip(jax.tree_util.tree_leaves_with_path(state), found[1], strict=True):
        if shape != (leaf.shape, leaf.dtype):
            raise CallerError(
                f"update: found {shape[1]}{list(shape[0])} at {jax.tree_util.keystr(path)} of the result, expected "
                f"{leaf.dtype}{list(leaf.shape)}, as in the state"
            )
