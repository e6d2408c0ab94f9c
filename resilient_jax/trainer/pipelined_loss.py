"""The loss of a trainer as a chain of blocks: what a pipeline needs to know of a recipe, without an array.

Also says what of a recipe a pipeline cannot do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jax.sharding import AbstractMesh

from resilient_jax.blocks.cut_model import CutModel, cut_model
from resilient_jax.blocks.layer_marks import mark_layers
from resilient_jax.blocks.loss_trace import CHANGED
from resilient_jax.errors import CallerError
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.pipeline.pipeline_config import PipelineConfig
from resilient_jax.pipeline.stage_runner import LOSS
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule
from resilient_jax.program_analysis.xla_cost import count_flops
from resilient_jax.sharding.stage_sharding import StageSharding, make_abstract_stage_mesh
from resilient_jax.sharding.trace_mesh import use_trace_mesh
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.loss_function import LossFunction
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.numerics import NonFinitePolicy
from resilient_jax.trainer.stage_axes import find_stage_sharding
from resilient_jax.trainer.train_step import Recipe, TrainStep, cast_parameters
from resilient_jax.trainer.training_state import Tree
from resilient_jax.trainer.variable_tree import VariableTree
from resilient_jax.weighted_mean import split_weights


def cut_training_loss(
    config: FitConfig,
    programs: TrainStep,
    axes: Mapping[str, int],
    devices: Sequence[Device],
    *,
    may_replicate: bool = False,
) -> tuple[CutModel, StageSharding]:
    """Return the model of a training in blocks, and the sharding of a stage, without devices.

    Args:
        devices: devices of one stage; only their number and kind count.
        may_replicate: as in `StageAxes`.

    Raises:
        CallerError: the model or an option does not fit a pipeline; the message says what stands in the way.
    """
    _check_recipe(config)
    mesh = make_abstract_stage_mesh(axes, devices)
    cut = _cut(config.recipe, programs, mesh)
    sharding = find_stage_sharding(config, cut, programs.example, mesh, may_replicate=may_replicate)
    return (cut.with_sharding(sharding) if mesh.size > 1 else cut), sharding


def make_marked_loss(
    recipe: Recipe, loss_fn: LossFunction, tree: VariableTree, *, training: bool
) -> Callable[[Tree, Tree, jax.Array], Any]:
    """Return `loss(variables, batch, key)`, in whose trace the layers of the model are marked: what is cut into blocks.

    It returns (loss, metrics), with totals and weights by name as `split_weights` gives them.

    Args:
        training: whether the model is applied as in training.
    """

    def loss(variables: Tree, batch: Tree, key: jax.Array) -> Any:  # noqa: ANN401 - (loss, metrics)
        means, _ = _apply(recipe, loss_fn, tree.split(variables), batch, key, training=training)
        return means.pop(LOSS), means

    return loss


def _apply(
    recipe: Recipe,
    loss_fn: LossFunction,
    variables: Variables,
    batch: Tree,
    key: jax.Array,
    *,
    training: bool,
) -> tuple[dict[str, Any], Variables]:
    """Return loss and metrics of a model with marked layers, as `split_weights` does, and the variables after it."""
    bound = cast_parameters(variables, recipe.numerics.compute_dtype)
    (loss, metrics), after = recipe.apply_loss(
        loss_fn, bound, batch, key, training=training, mark=_mark_layers
    )
    return split_weights({LOSS: loss, **metrics}), after


def _mark_layers(model: Any) -> Any:  # noqa: ANN401 - the user's
    return mark_layers(model) if isinstance(model, nnx.Module) else model


def _cut(recipe: Recipe, programs: TrainStep, mesh: AbstractMesh) -> CutModel:
    variables, reducer = programs.abstract_state.variables, programs.reducer
    tree = VariableTree(variables)

    def loss(found: Tree, batch: Tree, microbatch: tuple[jax.Array, jax.Array]) -> Any:  # noqa: ANN401 - see above
        (key, index), before = microbatch, tree.split(found)
        means, after = _apply(recipe, recipe.loss_fn, before, batch, key, training=True)
        changes = tree.join_collections(reducer.contribute(before, after, index))
        return means.pop(LOSS), {**means, CHANGED: changes}

    microbatch = jax.eval_shape(lambda: (jax.random.key(0), jnp.uint32(0)))
    with use_trace_mesh(mesh):
        return cut_model(
            loss,
            tree.join(variables),
            programs.example,
            microbatch,
            is_trained=tree.is_trained,
            remat=recipe.numerics.remat,
        )


def make_pipeline_config(config: FitConfig, programs: TrainStep, cut: CutModel) -> PipelineConfig:
    """Return what stays the same for the stages of a training; for hosts, with a log."""
    recipe, parallelism = config.recipe, config.parallelism
    assert parallelism.pipeline is not None
    weights = {weight.name: weight for weight in cut.trace.table.weights}
    num_params = len(jax.tree.leaves(programs.abstract_state.variables.params))

    def reduce_variable(name: str, old: Any, total: Any, count: Any) -> Any:  # noqa: ANN401 - arrays
        return programs.reducer.reduce_leaf(weights[name].leaf - num_params, old, total, count)

    return PipelineConfig(
        num_microbatches=recipe.num_microbatches,
        schedule=PipelineSchedule(parallelism.pipeline.schedule),
        reduction=parallelism.reduction,
        max_norm=recipe.numerics.clip_norm,
        log_bytes=parallelism.pipeline.log_bytes,
        params=programs.abstract_state.variables.params,
        reduce_variable=reduce_variable,
    )


def estimate_block_costs(cut: CutModel) -> list[float]:
    """Return the relative time of each block: the floating-point operations of its forward pass."""
    by_kind = []
    for kind in cut.kinds:
        program = kind.kind.derivative.forward_jaxpr
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        by_kind.append(max(1.0, count_flops(core.jaxpr_as_fun(program), *shapes)))
    return [by_kind[block.kind] for block in cut.blocks]


def _check_recipe(config: FitConfig) -> None:
    """Refuse what a pipeline cannot do, by name."""
    recipe = config.recipe
    if recipe.numerics.non_finite == NonFinitePolicy.SKIP:
        raise CallerError(
            'numerics: found non_finite="skip" with a pipeline, expected "stop" or "warn": a microbatch is on several '
            "hosts, and its gradients are in sums before its loss is known everywhere"
        )
    if config.parallelism.reduction == "fast":
        raise CallerError(
            'parallelism: found reduction="fast" with a pipeline, expected "exact" or "exact_wide": the parts of a sum '
            "come in no fixed order"
        )
