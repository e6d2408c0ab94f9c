"""The three programs of a step, and the one that makes the initial state.

- *compute* gives what is summed of one microbatch, on the mesh of one replica.
- *summarize* computes the count, norm and means of the sums, on the devices of one host.
- *update* divides the sums by the count, or by the weight of a loss that is a `WeightedMean`, clips, and makes the next
  state with the sharding of the state: on the devices of one host, or, of a sharded state, each device its shards. It
  is rounded at the same places wherever it runs (`sharding.exact_reductions`), so that the next state has the same bits
  replicated or sharded, on one device or many.

They are traced once in a process (*update* once for each shape of its mesh) and outlive every generation: no array,
device or mesh is in them. The shape of the mesh is a static argument; the step and the microbatch's index are
traced arguments. *summarize* and *update* are two programs even where both run on one host, so that rounding happens at
the same places.

Of a sharded state *update* computes raveled what it treats element by element (`sharding.elementwise`); optimizer and
rules are traced with the shapes of the parameters.

With a planner hosts may compute on meshes with other axes, over which sums are sharded. Then *summarize* adds up floats
exactly, too, so that norms have the same bits on every mesh.

Totals are not donated to the reduction: after a failure it falls back to them. *update* donates the committed state.
On this host's devices alone it cannot fail because of other hosts, and its result is committed with nothing in between:
either this host dies with both states, or it has the new one, and hosts that are behind fetch it. Lost shards of a
sharded state come from a snapshot.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError
from resilient_jax.program_analysis.program_digest import describe_program
from resilient_jax.sharding.elementwise import apply_elementwise, find_elementwise, ravel_like
from resilient_jax.sharding.exact_reductions import InexactOperation, apply_exactly, find_inexact, make_exact
from resilient_jax.sharding.placements import Placement, constrain_sharding, make_zero
from resilient_jax.sharding.raveled_array import MAX_RAVELED_SIZE, MIN_RAVELED_SIZE, is_raveled
from resilient_jax.sharding.trace_mesh import make_trace_mesh, use_trace_mesh
from resilient_jax.state.leaf_kinds import make_strong
from resilient_jax.step.assignment import DATA_AXIS
from resilient_jax.step.loss_gradient import differentiate_loss
from resilient_jax.step.random_keys import make_microbatch_key
from resilient_jax.trainer.initial_variables import GivenLeaves, replace_leaves
from resilient_jax.trainer.loss_function import LossFunction, Mean, Metrics, check_same_means
from resilient_jax.trainer.model_adapters import NNX_PARAMS, PARAMS, ModelAdapter, Variables
from resilient_jax.trainer.numerics import NonFinitePolicy, Numerics, cast_floats, clip_by_norm, is_all_finite
from resilient_jax.trainer.training_state import (
    EarlyStoppingState,
    MicrobatchSums,
    StepSummary,
    TrainingState,
    check_same_types,
)
from resilient_jax.trainer.variable_reductions import DEFAULT_RULES, Rule, VariableReducer, widen
from resilient_jax.weighted_mean import WeightedMean, find_divisor, is_weighted

Tree = Any
"""A pytree of arrays."""
EVALUATION_STEP: Final = 2**32 - 1
"""In place of the step in an evaluation's keys: the same each time, and different from those of every step."""
MAX_NAMED: Final = 3
"""Leaves that are named of an operation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parts of a step, without arrays.

    Attributes:
        num_microbatches: B, microbatches of a step.
        seed: seed of the initial variables, and of every microbatch's key.
        early_stopping: the initial state of early stopping; () without.
        variable_rules: rule for variables that the loss changes, by collection or type; see `check_rules`.
        axis_names: axis names of a replica's mesh.
        is_mesh_free: whether norms of sums that are sharded have the same bits on every mesh, if the norms can have
            them.
    """

    model: ModelAdapter
    optimizer: optax.GradientTransformation
    loss_fn: LossFunction
    num_microbatches: int
    seed: int
    numerics: Numerics
    early_stopping: EarlyStoppingState | tuple[()]
    variable_rules: Mapping[str, Rule] = dataclasses.field(default_factory=lambda: dict(DEFAULT_RULES))
    axis_names: tuple[str, ...] = (DATA_AXIS,)
    is_mesh_free: bool = False

    def trace_loss(self, model: Any, batch: Tree) -> Mean:  # noqa: ANN401 - the user's
        """Return the loss of a microbatch, for analyses of its program: no key changes a shape, or what it costs."""
        return self.loss_fn(model, batch, jax.random.key(0))[0]

    def apply_loss(
        self,
        loss_fn: LossFunction,
        bound: Variables,
        batch: Tree,
        key: jax.Array,
        *,
        training: bool,
        mark: Callable[[Any], Any] = lambda model: model,
    ) -> tuple[tuple[Mean, Metrics], Variables]:
        """Return ((loss, metrics), variables after it) of a microbatch.

        Args:
            mark: makes of the bound model what the loss is called with.
        """
        model_key, loss_key = jax.random.split(key)
        return self.model.apply(
            bound, model_key, lambda model: loss_fn(mark(model), batch, loss_key), training=training
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RaveledLeaves:
    """Which leaves of a sharded state, and of the sums that update it, are raveled; in the order of their trees.

    Attributes:
        state: whether each leaf of a `TrainingState` is raveled.
        sums: whether each leaf of `((gradients, collections), summary)` is raveled.
    """

    state: tuple[bool, ...]
    sums: tuple[bool, ...]


class TrainStep:
    """The programs of one recipe, for batches like one example.

    Attributes:
        init: `init() -> TrainingState` before step 0, the same on every host; `init(given)` with variables of the
            user's, see `match_variables`.
        compute: `compute(variables, batch, microbatch_id, placement=) -> MicrobatchSums` of one microbatch, where
            `microbatch_id` is of `make_microbatch_id(step, index)`, and `placement`, without devices, is that of the
            result.
        summarize: `summarize(sums) -> (StepSummary, metrics)`.
        update: `update(state, (gradients, collections), summary, placement=) -> TrainingState`; takes sums, which it
            divides; `placement`, without devices, is that of the state, of which leaves may be raveled.
        reducer: reducer of the variables that the loss changes.
        example: the abstract arrays of a microbatch.
        update_description: what `update` computes, for a comparison of hosts.
        why_mesh_bound: why the update may have other bits on another mesh: the operation and the leaves that it is
            computed from, in words; "": the update has the same bits on every mesh.
    """

    def __init__(self, recipe: Recipe, example: Tree) -> None:
        """Trace all programs once, without a device, so that a wrong recipe is refused before the first step.

        Args:
            example: the abstract arrays of a microbatch.

        Raises:
            CallerError: the loss, the optimizer or the model are not as expected.
            Exception: an exception of the model or the loss.
        """
        self._recipe = recipe
        self.example = example
        self.init = jax.jit(self._init)
        self.compute = jax.jit(self._compute, static_argnames="placement")
        self.summarize = jax.jit(self._summarize)
        self.update = jax.jit(self._update, static_argnames="placement", donate_argnums=0)
        self.abstract_state = jax.eval_shape(self._init)
        self.reducer, self.abstract_sums = self._trace_loss()
        self.abstract_summary, _ = jax.eval_shape(self._compute_summary, self.abstract_sums)
        sums = self.abstract_sums.gradients, self.abstract_sums.collections
        self._update_arguments = self.abstract_state, sums, self.abstract_summary
        update, after = jax.make_jaxpr(self._compute_next_state, return_shape=True)(*self._update_arguments)
        self.update_description = describe_program(update)
        self.why_mesh_bound = self._explain_inexact(find_inexact(update))
        check_same_types(self.abstract_state, after, "optimizer")

    @functools.cached_property
    def raveled_leaves(self) -> RaveledLeaves:
        """The leaves that the update treats element by element, and whose size is suitable; the same for any mesh."""
        state, sums, summary = self._update_arguments
        count = len(jax.tree.leaves(state))
        found = find_elementwise(self._trace_update(), [(index, index) for index in range(count)])
        sizes = [leaf.size for leaf in jax.tree.leaves((state, sums, summary))]
        raveled = tuple(
            one and MIN_RAVELED_SIZE <= size <= MAX_RAVELED_SIZE
            for one, size in zip(found, sizes, strict=True)
        )
        return RaveledLeaves(raveled[:count], raveled[count:])

    def _explain_inexact(self, found: InexactOperation | None) -> str:
        if found is None:
            return ""
        paths = [
            jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(self._update_arguments[0])
        ]
        named = [paths[index] for index in sorted(found.arguments) if index < len(paths)]
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        return (
            f"the update computes {found.primitive} of {list(found.shape)} from "
            f"{', '.join(named[:MAX_NAMED]) or 'the gradients'}{more}"
        )

    def _trace_update(self) -> core.ClosedJaxpr:
        closed = jax.make_jaxpr(self._compute_next_state)(*self._update_arguments)
        if self.why_mesh_bound:
            return closed
        # The number of the step is the first leaf of a state; the compiler does not know that it is not negative.
        return make_exact(closed, lambda arguments: jnp.minimum(arguments[0], 0))

    def _init(self, given: GivenLeaves | None = None) -> TrainingState:
        recipe = self._recipe
        # Linen makes its variables when the loss calls it: any batch of the right shape will do.
        batch = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.example)
        key = jax.random.key(recipe.seed)
        with use_trace_mesh(make_trace_mesh(recipe.axis_names)):
            variables = recipe.model.init(key, lambda model: recipe.loss_fn(model, batch, key))
        variables = replace_leaves(variables, given or {})
        return make_strong(
            TrainingState(
                step=jnp.zeros((), jnp.int32),
                variables=variables,
                opt_state=recipe.optimizer.init(variables.params),
                early_stopping=jax.tree.map(jnp.asarray, recipe.early_stopping),
            )
        )

    def _trace_loss(self) -> tuple[VariableReducer, MicrobatchSums]:
        """Trace the loss; return what becomes of the variables, and the shapes of the sums."""
        recipe, variables = self._recipe, self.abstract_state.variables
        bound = jax.eval_shape(self._cast, variables)

        def loss_of(bound: Variables, batch: Tree) -> tuple[Variables, Mean, Metrics]:
            key = jax.random.key(0)
            (loss, metrics), after = recipe.apply_loss(recipe.loss_fn, bound, batch, key, training=True)
            return after, loss, metrics

        with use_trace_mesh(make_trace_mesh(recipe.axis_names)):
            jaxpr, (after, loss, metrics) = jax.make_jaxpr(loss_of, return_shape=True)(bound, self.example)
        reducer = VariableReducer(recipe.variable_rules, bound, after, jaxpr)
        index = jax.ShapeDtypeStruct((), jnp.uint32)
        sums = MicrobatchSums(
            gradients=variables.params,
            collections=jax.eval_shape(reducer.contribute, bound, after, index),
            loss=loss,
            metrics=metrics,
            non_finite=jax.ShapeDtypeStruct((recipe.num_microbatches,), jnp.float32),
        )
        return reducer, jax.eval_shape(lambda tree: jax.tree.map(widen, tree), sums)

    def _cast(self, variables: Variables) -> Variables:
        return cast_parameters(variables, self._recipe.numerics.compute_dtype)

    def _compute(
        self,
        variables: Variables,
        batch: Tree,
        microbatch_id: jax.Array,
        *,
        placement: Placement,
    ) -> MicrobatchSums:
        recipe, index = self._recipe, microbatch_id[1]

        def loss_of(params: Tree) -> tuple[Mean, tuple[Metrics, Tree]]:
            key = make_microbatch_key(recipe.seed, microbatch_id)
            bound = self._cast(variables._replace(params=params))
            (loss, metrics), after = recipe.apply_loss(recipe.loss_fn, bound, batch, key, training=True)
            return loss, (metrics, self.reducer.contribute(variables, after, index))

        if self._recipe.numerics.remat:
            loss_of = jax.checkpoint(loss_of)
        with use_trace_mesh(placement.mesh):
            (loss, (metrics, collections)), gradients = differentiate_loss(loss_of, variables.params)
        check_same_means((loss, metrics), (self.abstract_sums.loss, self.abstract_sums.metrics))
        finite = is_all_finite((loss, gradients, collections))
        non_finite = jnp.zeros((self._recipe.num_microbatches,), jnp.float32)
        new = MicrobatchSums(gradients, collections, loss, metrics, non_finite)
        new = jax.tree.map(widen, new)
        if self._recipe.numerics.non_finite == NonFinitePolicy.SKIP:
            skipped = jax.tree.map(jnp.zeros_like, new)
            skipped = skipped._replace(collections=self.reducer.contribute_skipped(variables, index))
            new = jax.tree.map(lambda leaf, other: jnp.where(finite, leaf, other), new, skipped)
        new = new._replace(non_finite=new.non_finite.at[index].set(jnp.where(finite, 0, 1)))
        # Without the constraint the compiler may shard results as batches are sharded.
        return constrain_sharding(new, placement)

    def _summarize(self, sums: MicrobatchSums) -> tuple[StepSummary, Metrics]:
        if self.why_mesh_bound or not self._recipe.is_mesh_free:
            return self._compute_summary(sums)
        closed, found = jax.make_jaxpr(self._compute_summary, return_shape=True)(sums)
        zero = jnp.minimum(sums.non_finite.max(), 0).astype(jnp.int32)
        return jax.tree.structure(found).unflatten(apply_exactly(closed, jax.tree.leaves(sums), zero))

    def _compute_summary(self, sums: MicrobatchSums) -> tuple[StepSummary, Metrics]:
        """Return the means, sums / B or totals / weights, without the microbatches that are skipped."""
        skips, skipped = self._recipe.numerics.non_finite == NonFinitePolicy.SKIP, sums.non_finite.sum()
        count = jnp.float32(self._recipe.num_microbatches)
        if skips:
            count = count - skipped
        divisor = find_divisor(sums.loss.weight) if isinstance(sums.loss, WeightedMean) else count
        norm = optax.tree.norm(_divide(sums.gradients, divisor)).astype(jnp.float32)
        means = jax.tree.map(
            lambda mean: mean.mean if isinstance(mean, WeightedMean) else mean / count,
            {"loss": sums.loss, **sums.metrics},
            is_leaf=is_weighted,
        )
        metrics = {**means, "grad_norm": norm, **({"skipped": skipped} if skips else {})}
        return StepSummary(count, divisor, norm, means["loss"]), metrics

    def _update(
        self,
        state: TrainingState,
        sums: tuple[Tree, Tree],
        summary: StepSummary,
        *,
        placement: Placement,
    ) -> TrainingState:
        arguments = jax.tree.leaves((state, sums, summary), is_leaf=is_raveled)
        # Traced again, and not kept from `raveled_leaves`: constants in it would be arrays of a generation.
        found = apply_elementwise(self._trace_update(), arguments)
        new = jax.tree.structure(state, is_leaf=is_raveled).unflatten(
            [ravel_like(leaf, before) for leaf, before in zip(found, arguments, strict=False)]
        )
        return constrain_sharding(new, placement)

    def _compute_next_state(
        self, state: TrainingState, sums: tuple[Tree, Tree], summary: StepSummary
    ) -> TrainingState:
        """Update with gradient = sum / divisor, clipped, and reduce the other variables."""
        recipe, params = self._recipe, state.variables.params
        gradients = _divide(sums[0], summary.divisor)
        if recipe.numerics.clip_norm is not None:
            gradients = clip_by_norm(gradients, summary.grad_norm, recipe.numerics.clip_norm)
        # Sums are in float32 at least; the optimizer gets gradients in the
        # dtypes of the parameters, as without a trainer.
        updates, optimizer = optax.with_extra_args_support(recipe.optimizer).update(
            _cast_like(params, gradients), state.opt_state, params, value=summary.mean_loss
        )
        return make_strong(
            TrainingState(
                step=state.step + 1,
                variables=state.variables._replace(
                    params=optax.apply_updates(params, updates),
                    collections=self.reducer.reduce(state.variables, sums[1], summary.num_microbatches),
                ),
                opt_state=optimizer,
                early_stopping=state.early_stopping,
            )
        )


def check_optimizer(optimizer: object) -> optax.GradientTransformation:
    """Return the user's optimizer.

    Raises:
        CallerError: `optimizer` is not an Optax transformation.
    """
    is_pair = callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    if is_pair and not isinstance(optimizer, type):
        return optimizer  # pyright: ignore[reportReturnType] - a pair of functions is all that Optax asks for
    remedy = (
        "Call it, with its learning rate"
        if callable(optimizer)
        else "Give it without the model: no nnx.Optimizer, no TrainState"
    )
    raise CallerError(
        f"optimizer: found {describe_value(optimizer)}, expected an optax.GradientTransformation, such as "
        f"optax.adamw(3e-4). {remedy}"
    )


def cast_parameters(variables: Variables, dtype: Any) -> Variables:  # noqa: ANN401 - what jnp takes for a dtype
    """Return the variables with all parameters, frozen ones too, in `dtype`; None: as they are."""
    frozen = {
        name: cast_floats(tree, dtype)
        for name, tree in variables.collections.items()
        if name in (PARAMS, NNX_PARAMS)
    }
    return Variables(cast_floats(variables.params, dtype), {**variables.collections, **frozen})


def make_zeros(abstract: Tree, placement: Placement) -> Tree:
    """Return zeros in these shapes, made on the host: without a program, a new generation compiles nothing."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: make_zero(leaf, placement(jax.tree_util.keystr(path), leaf)), abstract
    )


def _divide(tree: Tree, divisor: jax.Array) -> Tree:
    return jax.tree.map(lambda summed: summed / divisor, tree)


def _cast_like(like: Tree, tree: Tree) -> Tree:
    """Return the tree in the dtypes of another."""
    return jax.tree.map(lambda origin, leaf: leaf.astype(origin.dtype), like, tree)
