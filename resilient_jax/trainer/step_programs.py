"""The three programs of a step, and the one that makes the initial state.

- *accumulate* adds one microbatch to the sums, on the mesh of one replica.
- *summarize* computes the count, norm and means of the sums, on the devices of one host.
- *update* divides the sums by the count, clips, and makes the next state with the sharding of the state: on the devices
  of one host, or, of a sharded state, each device its shards.

They are traced once in a process (*update* once for each shape of its mesh) and outlive every generation: no array,
device or mesh is in them. The shape of the mesh is a static argument; the step and the microbatch's index are
traced arguments. *summarize* and *update* are two programs even where both run on one host, so that rounding happens at
the same places.

Sums are never donated: a failure in the reduction falls back to them. *update* donates the committed state. On this
host's devices alone it cannot fail because of other hosts, and its result is committed with nothing in between: either
this host dies with both states, or it has the new one, and hosts that are behind fetch it. Lost shards of a sharded
state come from a snapshot.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from resilient_jax.argument_checks import describe_value
from resilient_jax.errors import CallerError
from resilient_jax.sharding.placements import Placement
from resilient_jax.trainer.loss_function import LossFunction, Metrics
from resilient_jax.trainer.model_adapters import ModelAdapter, Variables
from resilient_jax.trainer.numerics import NonFinitePolicy, Numerics, cast_floats, clip_by_norm, is_all_finite
from resilient_jax.trainer.training_state import (
    EarlyStoppingState,
    MicrobatchSums,
    StepSummary,
    TrainingState,
    check_same_types,
)

Tree = Any
"""A pytree of arrays."""
EVALUATION_STEP: Final = 2**32 - 1
"""In place of the step in an evaluation's keys: the same each time, and different from those of every step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parts of a step, without arrays.

    Attributes:
        num_microbatches: B, in a step.
        seed: of the initial variables, and of every microbatch's key.
        early_stopping: the initial state of early stopping; () without.
    """

    model: ModelAdapter
    optimizer: optax.GradientTransformation
    loss_fn: LossFunction
    num_microbatches: int
    seed: int
    numerics: Numerics
    early_stopping: EarlyStoppingState | tuple[()]


class StepPrograms:
    """The programs of one recipe, for batches like one example.

    Attributes:
        init: `init() -> TrainingState` before step 0, the same on every host.
        accumulate: `accumulate(sums, variables, batch, microbatch_id, placement=) -> MicrobatchSums`, where
            `microbatch_id` is of `make_microbatch_id(step, index)`, and `placement`, without devices, of the sums.
        summarize: `summarize(sums) -> (StepSummary, metrics)`.
        update: `update(state, (gradients, batch_stats), summary, placement=) -> TrainingState`; takes sums, which it
            divides; `placement`, without devices, is that of the state.
        abstract_state: the shapes of a state.
        abstract_sums: the shapes of the sums.
    """

    def __init__(self, recipe: Recipe, example: Tree) -> None:
        """Trace all programs once, without a device, so that a wrong recipe is refused before the first step.

        Args:
            recipe: what to compile.
            example: the abstract arrays of a microbatch.

        Raises:
            CallerError: the loss, the optimizer or the model are not as expected.
            Exception: an exception of the model or the loss.
        """
        self._recipe = recipe
        self._example = example
        self.init = jax.jit(self._init)
        self.accumulate = jax.jit(self._accumulate, static_argnames="placement")
        self.summarize = jax.jit(self._summarize)
        self.update = jax.jit(self._update, static_argnames="placement", donate_argnums=0)
        self.abstract_state = jax.eval_shape(self._init)
        self.abstract_sums = self._abstract_sums()
        summary, _ = jax.eval_shape(self._summarize, self.abstract_sums)
        sums = self.abstract_sums.gradients, self.abstract_sums.batch_stats
        after = jax.eval_shape(self._update, self.abstract_state, sums, summary, placement=None)
        check_same_types(self.abstract_state, after, "optimizer")

    def _init(self) -> TrainingState:
        recipe = self._recipe
        # Linen makes its variables when the loss calls it: any batch of the right shape will do.
        batch = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._example)
        key = jax.random.key(recipe.seed)
        variables = recipe.model.init(key, lambda model: recipe.loss_fn(model, batch, key))
        return TrainingState(
            step=jnp.zeros((), jnp.int32),
            variables=variables,
            opt_state=recipe.optimizer.init(variables.params),
            early_stopping=jax.tree.map(jnp.asarray, recipe.early_stopping),
        )

    def _abstract_sums(self) -> MicrobatchSums:
        def wide(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _widen_dtype(leaf.dtype)), tree)

        variables = self.abstract_state.variables
        _, (metrics, batch_stats) = jax.eval_shape(
            lambda v, batch: self._loss(v.params, v, batch, jax.random.key(0)), variables, self._example
        )
        check_same_types(wide(variables.batch_stats), wide(batch_stats), "model")  # types are cast back
        return MicrobatchSums(
            gradients=wide(variables.params),
            batch_stats=wide(variables.batch_stats),
            loss=jax.ShapeDtypeStruct((), jnp.float32),
            metrics=wide(metrics),
            non_finite=jax.ShapeDtypeStruct((self._recipe.num_microbatches,), jnp.float32),
        )

    def _loss(
        self, params: Tree, variables: Variables, batch: Tree, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, Tree]]:
        """Return (loss, (metrics, batch_stats)) of a microbatch, as a function of the parameters."""
        recipe = self._recipe
        model_key, loss_key = jax.random.split(key)
        bound = variables._replace(params=cast_floats(params, recipe.numerics.compute_dtype))
        (loss, metrics), batch_stats = recipe.model.apply(
            bound, model_key, lambda model: recipe.loss_fn(model, batch, loss_key), training=True
        )
        return loss, (metrics, batch_stats)

    def _accumulate(
        self,
        sums: MicrobatchSums,
        variables: Variables,
        batch: Tree,
        microbatch_id: jax.Array,
        *,
        placement: Placement,
    ) -> MicrobatchSums:
        def loss_of(params: Tree) -> tuple[jax.Array, tuple[Metrics, Tree]]:
            return self._loss(params, variables, batch, make_microbatch_key(self._recipe.seed, microbatch_id))

        if self._recipe.numerics.remat:
            loss_of = jax.checkpoint(loss_of)
        (loss, (metrics, batch_stats)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            variables.params
        )
        finite = is_all_finite((loss, gradients, batch_stats))
        new = MicrobatchSums(gradients, batch_stats, loss, metrics, jnp.zeros_like(sums.non_finite))
        new = jax.tree.map(lambda leaf: leaf.astype(_widen_dtype(leaf.dtype)), new)
        if self._recipe.numerics.non_finite == NonFinitePolicy.SKIP:
            new = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), new)
        new = new._replace(non_finite=new.non_finite.at[microbatch_id[1]].set(jnp.where(finite, 0, 1)))
        # Without the constraint the compiler may shard results as batches are sharded.
        return constrain_sharding(jax.tree.map(jnp.add, sums, new), placement)

    def _summarize(self, sums: MicrobatchSums) -> tuple[StepSummary, Metrics]:
        """Return the means, sums / B, without the microbatches that are skipped."""
        skips, skipped = self._recipe.numerics.non_finite == NonFinitePolicy.SKIP, sums.non_finite.sum()
        count = jnp.float32(self._recipe.num_microbatches)
        if skips:
            count = count - skipped
        norm = optax.tree.norm(_divide(sums.gradients, count)).astype(jnp.float32)
        means = _divide({"loss": sums.loss, **sums.metrics}, count)
        metrics = {**means, "grad_norm": norm, **({"skipped": skipped} if skips else {})}
        return StepSummary(count, norm, means["loss"]), metrics

    def _update(
        self,
        state: TrainingState,
        sums: tuple[Tree, Tree],
        summary: StepSummary,
        *,
        placement: Placement | None,
    ) -> TrainingState:
        """Update with gradient = sum / count, clipped; the new batch_stats are the mean over microbatches."""
        recipe, params = self._recipe, state.variables.params
        gradients, batch_stats = _divide(sums, summary.num_microbatches)
        if recipe.numerics.clip_norm is not None:
            gradients = clip_by_norm(gradients, summary.grad_norm, recipe.numerics.clip_norm)
        updates, optimizer = optax.with_extra_args_support(recipe.optimizer).update(
            _cast_like(params, gradients), state.opt_state, params, value=summary.mean_loss
        )
        new = TrainingState(
            step=state.step + 1,
            variables=state.variables._replace(
                params=optax.apply_updates(params, updates),
                batch_stats=_cast_like(state.variables.batch_stats, batch_stats),
            ),
            opt_state=optimizer,
            early_stopping=state.early_stopping,
        )
        return new if placement is None else constrain_sharding(new, placement)


def check_optimizer(optimizer: object) -> optax.GradientTransformation:
    """Return the user's optimizer.

    Raises:
        CallerError: it is not an Optax transformation.
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


def make_microbatch_id(step: int, index: int) -> np.ndarray:
    """Return uint32[2], the step and the index, as the programs take them: other values compile nothing."""
    return np.array([step, index], np.uint32)


def make_microbatch_key(seed: int, microbatch_id: jax.Array) -> jax.Array:
    """Return the key of one microbatch, a pure function of (seed, step, index)."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), microbatch_id[0]), microbatch_id[1])


def constrain_sharding(tree: Tree, placement: Placement) -> Tree:
    """Return the tree with the shardings of a placement, which has no devices."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(
            leaf, placement(jax.tree_util.keystr(path), leaf)
        ),
        tree,
    )


def make_zeros(abstract: Tree, placement: Placement) -> Tree:
    """Return zeros in these shapes. They are made on the host: no program, so a new generation compiles nothing."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(
            np.zeros(leaf.shape, leaf.dtype), placement(jax.tree_util.keystr(path), leaf)
        ),
        abstract,
    )


def _widen_dtype(dtype: Any) -> Any:  # noqa: ANN401 - whatever JAX takes for one
    """Return the dtype in which a dtype is summed: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def _divide(tree: Tree, count: jax.Array) -> Tree:
    return jax.tree.map(lambda summed: summed / count, tree)


def _cast_like(like: Tree, tree: Tree) -> Tree:
    """Return the tree in the dtypes of another; integers are rounded."""

    def cast(origin: Any, leaf: jax.Array) -> jax.Array:  # noqa: ANN401 - any array
        is_whole = jnp.issubdtype(origin.dtype, jnp.integer)
        return (jnp.round(leaf) if is_whole else leaf).astype(origin.dtype)

    return jax.tree.map(cast, like, tree)
