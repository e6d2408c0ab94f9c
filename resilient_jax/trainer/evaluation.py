"""Evaluation: the mean loss on other data, of microbatches that all hosts share."""

import dataclasses
import functools
from collections.abc import Callable, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.data.array_rows import view_as_rows
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart
from resilient_jax.data.microbatches import MicrobatchData, make_microbatch_data
from resilient_jax.data.random_access import RandomAccessData
from resilient_jax.errors import CallerError, DataError
from resilient_jax.sharding.placements import Placement, constrain_sharding
from resilient_jax.sharding.trace_mesh import make_trace_mesh, use_trace_mesh
from resilient_jax.step.random_keys import make_microbatch_key
from resilient_jax.trainer.loss_function import EVALUATION_PREFIX, LossFunction, check_same_means
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.train_step import Recipe, cast_parameters
from resilient_jax.weighted_mean import WeightedMean, read_divisor

Tree = Any
"""A pytree of arrays."""


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What to evaluate, and how often. Its metrics have the prefix `eval_`.

    A metric is its mean over the microbatches; a `WeightedMean` is divided once, by the weight of all of them.

    The model is in evaluation mode: `nnx` modules after `eval()`; a Linen module as the loss calls it.

    Attributes:
        data: what `Trainer(data=)` takes; arrays and a source of examples are read in their own order. A function gets
            step 0 each time.
        interval_steps: evaluate before each step whose number is a multiple of this number, except 0; and after the
            last step.
        microbatch_size: examples in a microbatch; None: as many as in training.
        num_microbatches: microbatches of an evaluation; None: all of the source, which must be a multiple of the
            microbatch size.
        loss_fn: a function like that of training; None: the same function.
        use_ema: evaluate the average of the parameters, of `Numerics(ema_decay=...)`, in place of the parameters.

    Raises:
        CallerError: a number is below 1.
    """

    data: Any
    interval_steps: int
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    loss_fn: Callable[..., Any] | None = None
    use_ema: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("interval_steps", "microbatch_size", "num_microbatches"):
            if (found := getattr(self, name)) is not None and found < 1:
                raise CallerError(f"evaluation: found {name}={found}, expected at least 1")

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate when `step` of `num_steps` steps are committed."""
        return step == num_steps or (step > 0 and step % self.interval_steps == 0)

    def count_microbatches(self, microbatch_size: int) -> int:
        """Return how many microbatches an evaluation has.

        Raises:
            CallerError: the data has no length, or its length is no multiple of `microbatch_size`.
        """
        if self.num_microbatches is not None:
            return self.num_microbatches
        source = view_as_rows(self.data)
        if not isinstance(source, Sized):
            raise CallerError(
                f"evaluation: found a {type(source).__name__} without a length as data, expected num_microbatches=, "
                "how many to evaluate"
            )
        count, rest = divmod(len(source), microbatch_size)
        if rest or not count:
            raise CallerError(
                f"evaluation: found {len(source)} examples, expected a multiple of the microbatch size "
                f"{microbatch_size}. Set num_microbatches={max(count, 1)} to leave out the last {rest}, or give "
                "another microbatch_size"
            )
        return count

    def make_data(self, microbatch_size: int, seed: int) -> MicrobatchData:
        """Return the evaluation's data, the same in every step.

        Raises:
            CallerError: see `count_microbatches`.
            DataError: the data is none that `make_microbatch_data` takes.
        """
        try:
            make = functools.partial(
                make_microbatch_data,
                self.data,
                num_microbatches=self.count_microbatches(microbatch_size),
                microbatch_size=microbatch_size,
                seed=seed,
            )
            data = make()
            # Only such a source is shuffled by itself; the others refuse the argument.
            if isinstance(data, RandomAccessData):
                data = make(shuffle=False)
        except DataError as error:
            raise DataError(f"evaluation: {error}") from error
        return RepeatedStepData(data)


class RepeatedStepData:
    """Data that returns the microbatches of step 0 in every step."""

    def __init__(self, data: MicrobatchData) -> None:
        self._data = data

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Return microbatch `index` of step 0."""
        return self._data.batch(0, index, part)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return the document lengths of microbatch `index` of step 0."""
        return self._data.lengths(0, index)


class EvaluationSums(NamedTuple):
    """Sums over the microbatches of an evaluation: float32[] each, or a `WeightedMean` of two."""

    loss: Any
    metrics: dict[str, Any]


class EvaluationProgram:
    """The program that computes one microbatch's loss and metrics.

    Attributes:
        compute: `compute(variables, batch, microbatch_id, placement=) -> EvaluationSums`; see `TrainStep`.
    """

    def __init__(self, recipe: Recipe, loss_fn: LossFunction, variables: Variables, example: Tree) -> None:
        """Trace the loss once, without a device.

        Raises:
            CallerError: the loss returns no scalar.
        """
        self._recipe, self._loss = recipe, loss_fn
        self.compute = jax.jit(self._compute, static_argnames="placement")
        microbatch_id = jax.ShapeDtypeStruct((2,), jnp.uint32)
        with use_trace_mesh(make_trace_mesh(recipe.axis_names)):
            self.abstract_sums = jax.eval_shape(self._compute_sums, variables, example, microbatch_id)

    def _compute_sums(self, variables: Variables, batch: Tree, microbatch_id: jax.Array) -> EvaluationSums:
        recipe, key = self._recipe, make_microbatch_key(self._recipe.seed, microbatch_id)
        bound = cast_parameters(variables, recipe.numerics.compute_dtype)
        found, _ = recipe.apply_loss(self._loss, bound, batch, key, training=False)
        return EvaluationSums(*found)

    def _compute(
        self,
        variables: Variables,
        batch: Tree,
        microbatch_id: jax.Array,
        *,
        placement: Placement,
    ) -> EvaluationSums:
        with use_trace_mesh(placement.mesh):
            found = self._compute_sums(variables, batch, microbatch_id)
        check_same_means(found, self.abstract_sums)
        return constrain_sharding(found, placement)


def compute_metrics(sums: EvaluationSums, num_microbatches: int) -> dict[str, float]:
    """Return the means, by their names with the prefix "eval_"."""
    by_name = jax.device_get({"loss": sums.loss, **sums.metrics})
    return {
        f"{EVALUATION_PREFIX}{name}": _divide_sum(summed, num_microbatches)
        for name, summed in by_name.items()
    }


def _divide_sum(summed: Any, num_microbatches: int) -> float:  # noqa: ANN401 - a number, or a `WeightedMean`
    if isinstance(summed, WeightedMean):
        return float(summed.total) / read_divisor(float(summed.weight))
    return float(summed) / num_microbatches
