"""Which axes the devices of a stage have, and along which of them each weight is sharded."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.blocks.model_weights import Weight
from resilient_jax.errors import CallerError
from resilient_jax.health.finding import Finding
from resilient_jax.ids import HostName
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import ModelPart, TensorRole
from resilient_jax.planning.tensor_partition import find_divisors, partition_tensor
from resilient_jax.policy.devices_after_loss import (
    DeviceChoice,
    DevicesAfterLoss,
    choose_devices_to_leave_out,
    explain_all_devices,
)
from resilient_jax.program_analysis.abstract_program import make_abstract_program
from resilient_jax.sharding.layer_stacks import LayerPosition
from resilient_jax.sharding.logical_axes import LogicalAxisRules, LogicalNames, name_dims
from resilient_jax.sharding.stage_sharding import (
    EXAMPLE_AXES,
    STAGE_AXES,
    STAGE_DATA_AXIS,
    StageSharding,
)
from resilient_jax.sharding.state_tensors import ParameterInfo, make_tensor
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.pipeline_options import Pipeline
from resilient_jax.trainer.planner import TESTED_PLATFORM


def find_stage_axes(options: Pipeline, num_devices: int, host: HostName) -> dict[str, int]:
    """Return the sizes of `STAGE_AXES` on a host: as given; what is left is that of fsdp, unless it is given.

    Raises:
        CallerError: the sizes do not multiply to the host's devices.
    """
    sizes = {axis: options.axis_sizes.get(axis, 1) for axis in STAGE_AXES}
    others = math.prod(size for axis, size in sizes.items() if axis != Axis.FSDP)
    if Axis.FSDP.value not in options.axis_sizes and num_devices % others == 0:
        sizes[Axis.FSDP.value] = num_devices // others
    if math.prod(sizes.values()) != num_devices:
        raise CallerError(
            f"pipeline: found axis_sizes={dict(options.axis_sizes)} and {num_devices} devices on {host}, expected "
            "sizes that multiply to the devices of each host. fsdp takes what others leave, if it is not given"
        )
    return sizes


@dataclasses.dataclass(frozen=True, slots=True)
class StageAxes:
    """The axes of the devices of a host.

    Attributes:
        sizes: sizes by axis of `STAGE_AXES`, which multiply to the devices that are used.
        may_replicate: whether weights are replicated along an axis that shards none, as on a host that has too few
            devices for the axes of the job; False: such an axis is an error.
    """

    sizes: Mapping[str, int]
    may_replicate: bool = False


def fit_stage_axes(
    options: Pipeline, num_devices: int, host: HostName, *, num_examples: int, can_reduce: bool
) -> StageAxes:
    """Return the axes of a host: those of the job, or, if it has too few devices for them, such as it can have.

    Args:
        num_examples: examples of a microbatch, which the shares of a host's devices have to divide.
        can_reduce: whether other hosts have more devices, or this host had when the job began.

    Raises:
        CallerError: the job's axes do not multiply to the host's devices, and the host cannot have others.
    """
    try:
        sizes = find_stage_axes(options, num_devices, host)
    except CallerError:
        if not can_reduce:
            raise
    else:
        if not can_reduce or num_examples % math.prod(sizes[axis] for axis in EXAMPLE_AXES) == 0:
            return StageAxes(sizes, may_replicate=can_reduce)
    return StageAxes(reduce_stage_axes(options.axis_sizes, num_devices, num_examples), may_replicate=True)


def reduce_stage_axes(given: Mapping[str, int], num_devices: int, num_examples: int) -> dict[str, int]:
    """Return the sizes of `STAGE_AXES` on a host with fewer devices than the job's axes need.

    As many devices are used as can be. Of expert and tensor a part is kept that divides what was given, so the dims of
    weights can be sharded by it; the rest shares examples, and shards weights unless the job has `data` alone for that.

    >>> reduce_stage_axes({"tensor": 4}, 2, 8)
    {'data': 1, 'fsdp': 1, 'expert': 1, 'tensor': 2}
    >>> reduce_stage_axes({"fsdp": 4}, 3, 8), reduce_stage_axes({"fsdp": 4}, 3, 12)
    ({'data': 1, 'fsdp': 2, 'expert': 1, 'tensor': 1}, {'data': 1, 'fsdp': 3, 'expert': 1, 'tensor': 1})

    Args:
        given: sizes of the job's axes.
        num_examples: examples of a microbatch, which the shares of a host's devices have to divide.
    """
    full = {axis: given.get(axis, 1) for axis in STAGE_AXES}
    is_replicated = full[STAGE_DATA_AXIS] > 1 and given.get(Axis.FSDP.value) == 1
    sharing = STAGE_DATA_AXIS if is_replicated else Axis.FSDP.value
    for used in range(num_devices, 1, -1):
        for tensor, expert in itertools.product(
            *(find_divisors(full[axis])[::-1] for axis in (Axis.TENSOR.value, Axis.EXPERT.value))
        ):
            shares, rest = divmod(used, tensor * expert)
            if not rest and num_examples % shares == 0:
                found = {Axis.TENSOR.value: tensor, Axis.EXPERT.value: expert, sharing: shares}
                return {axis: found.get(axis, 1) for axis in STAGE_AXES}
    return dict.fromkeys(STAGE_AXES, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class FewerDevices:
    """What the hosts of a pipeline do without some of their devices.

    Attributes:
        axes: axes of a host that has all devices, as `make_replica_axes` gives them.
        num_examples: examples of a microbatch, which the shares of a host's devices have to divide.
        why_equal: why all hosts must have as many devices, in words; "": hosts may differ.
    """

    axes: Mapping[str, int]
    num_examples: int
    why_equal: str

    def leave_out(self, after_loss: DevicesAfterLoss, found: Finding) -> DeviceChoice | str:
        """Return which of its slow devices a host does best without; or why it keeps all.

        Args:
            after_loss: what a host does with the devices that are left.
        """
        if self.why_equal:
            return f"all hosts of this pipeline have as many devices: {self.why_equal}"
        choice = choose_devices_to_leave_out(found.device_speeds, found.slow_devices, after_loss)
        if choice is None:
            return explain_all_devices(found.slow_devices, after_loss)
        # Of those that are left its axes may use fewer.
        sizes = reduce_stage_axes(self.axes, len(choice.used), self.num_examples)
        num_used = math.prod(sizes.values())
        speed = choice.speed * num_used / len(choice.used)
        return choice._replace(used=choice.used[:num_used], speed=speed)


def explain_equal_axes(options: Pipeline, why_mesh_bound: str) -> str:
    """Return why all hosts must have as many devices, and what to change, in words; "": they may differ.

    Args:
        why_mesh_bound: as in `TrainStep`.
    """
    by_host = options.axes_by_host
    if not (jax.default_backend() == TESTED_PLATFORM if by_host is None else by_host):
        return "axes_by_host is off. rj.Pipeline(axes_by_host=True) allows others"
    return (
        f"{why_mesh_bound}, whose bits depend on the axes. Another optimizer allows others"
        if why_mesh_bound
        else ""
    )


def make_replica_axes(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the axes of a mesh with which a host computes with the whole model, where one has it.

    All that share examples are the first one: weights are replicated there.
    """
    examples = math.prod(sizes[axis] for axis in EXAMPLE_AXES)
    first, *others = STAGE_AXES
    return (first, examples), *((axis, 1 if axis in EXAMPLE_AXES else sizes[axis]) for axis in others)


def find_stage_sharding(
    config: FitConfig,
    cut: CutModel,
    example: Any,  # noqa: ANN401 - a tree of shapes
    mesh: AbstractMesh,
    *,
    may_replicate: bool = False,
) -> StageSharding:
    """Return the sharding of a stage, without devices.

    Args:
        example: shapes of a microbatch.
        mesh: mesh of `STAGE_AXES`.
        may_replicate: as in `StageAxes`.

    Raises:
        CallerError: no weight has a dim for an axis above 1; a logical name is unknown.
    """
    options = config.planner or config.parallelism.pipeline
    rules = (options.logical_axis_rules if options is not None else None) or LogicalAxisRules()
    axes = {Axis(axis): size for axis, size in mesh.shape.items() if axis in list(Axis)}
    specs: dict[str, P] = {}
    if math.prod(axes.values()) > 1:
        names = _read_names(config, example)
        specs = {
            weight.name: _find_spec(weight, _name_dims(weight, cut, names, rules), rules, axes)
            for weight in cut.trace.table.weights
        }
    if not may_replicate:
        _check_used(specs, axes)
    return StageSharding(mesh=mesh, weight_specs=specs, num_examples=config.microbatch_size)


def _read_names(config: FitConfig, example: Any) -> dict[str, LogicalNames]:  # noqa: ANN401 - a tree of shapes
    """Return the logical names in the metadata of the model, by path."""
    return make_abstract_program(config.model, config.recipe.trace_loss, example).names


def _name_dims(
    weight: Weight, cut: CutModel, names: Mapping[str, LogicalNames], rules: LogicalAxisRules
) -> LogicalNames:
    if weight.layer is None:
        return name_dims(weight.path, weight.shape, names, rules)
    # Of a leaf that is stacked over layers; these are its first dim.
    count = sum(other.leaf == weight.leaf for other in cut.trace.table.weights)
    return name_dims(weight.path, (count, *weight.shape), names, rules)[1:]


def _find_spec(weight: Weight, names: LogicalNames, rules: LogicalAxisRules, axes: Mapping[Axis, int]) -> P:
    info = ParameterInfo(
        path=weight.path,
        shape=weight.shape,
        itemsize=weight.dtype.itemsize,
        names=names,
        position=LayerPosition(path=weight.path),
    )
    tensor = make_tensor(info, weight.path, TensorRole.PARAMETER, (ModelPart.LAYER,), rules)
    found = [tuple(axis.value for axis in dim) for dim in partition_tensor(tensor, axes)]
    while found and not found[-1]:
        found.pop()
    return P(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in found))


def _check_used(specs: Mapping[str, P], axes: Mapping[Axis, int]) -> None:
    used = {
        axis
        for spec in specs.values()
        for entry in spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    for axis, size in axes.items():
        if size > 1 and axis.value not in used:
            raise CallerError(
                f"pipeline: found no weight that {axis} {size} shards, expected at least one among "
                f"{', '.join(list(specs)[:3])}, ... Name their dims: in the model's Flax metadata, or by rj.Pipeline("
                "logical_axis_rules=rj.LogicalAxisRules(names_by_path=...)). fsdp and data need no names"
            )
