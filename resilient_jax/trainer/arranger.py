"""Which replicas compute the steps of a generation, and how their arrays are placed: as given, or as planned."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from jax.sharding import Mesh

from resilient_jax.errors import CallerError
from resilient_jax.events import EventKind
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import STAGE_PLAN_AXES
from resilient_jax.planning.program_cost import StateTensor
from resilient_jax.planning.tensor_partition import find_violated_rules
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.program_analysis.program_analysis import list_state_tensors
from resilient_jax.sharding.partition_specs import StatePartitioner
from resilient_jax.sharding.placements import ParameterPlacement, ParameterSpecs, ReplicatedPlacement
from resilient_jax.sharding.state_tensors import make_divisibility_rules
from resilient_jax.step.assignment import DATA_AXIS, ReplicaShape, count_devices_by_host
from resilient_jax.trainer.accumulation import make_abstract
from resilient_jax.trainer.arrangement import (
    REPLICA_AXES,
    AnyPlan,
    Arrangement,
    PlanSearcher,
    estimate_step_s,
    list_parameter_specs,
    list_plan_axes,
    name_axes,
)
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.stage_axes import StageAxes, fit_stage_axes, make_replica_axes
from resilient_jax.worker.world import World

FIRST_GENERATION: Final = 1
"""The number of a job's first generation, in which hosts have all of their devices."""
AXES_EQUAL: Final = "equal"
AXES_UNEQUAL: Final = "unequal"
"""Whether the replicas of a plan have the same axes on all hosts, in an event."""


class Arranger:
    """Makes the arrangement of each generation of one `fit`.

    Attributes:
        plan_searcher: searcher of plans; None: without a planner.
        why_equal_stages: why all hosts of a pipeline must have as many devices, in words; "": hosts may differ.
    """

    def __init__(self, config: FitConfig) -> None:
        self._config = config
        self.plan_searcher = PlanSearcher(config) if config.planner is not None else None
        self._last: AnyPlan | None = None
        self._stage_plan: Plan | None = None
        self._specs: ParameterSpecs | None = None
        """Of parameters over given axes."""
        self.why_equal_stages = ""

    def arrange(self, world: World, variables: Variables) -> Arrangement:
        """Return the arrangement for the live hosts, the same on each. A plan that differs from the last is an event.

        Raises:
            CallerError: no plan fits; a host is not in the topology; given axes do not fit devices or parameters.
        """
        if self._config.parallelism.pipeline is not None:
            arrangement = self._arrange_stages(world)
            if self._stage_plan is not None:
                self._record_plan(world, self._stage_plan)
            return arrangement
        if self._config.parallelism.axes is not None:
            return self._arrange_mesh(world, self._config.parallelism.axes, variables)
        if self.plan_searcher is None:
            return Arrangement(
                replica_shape=self._config.parallelism.replica_shape,
                placement=ReplicatedPlacement(world.local_mesh(DATA_AXIS)),
            )
        return self._arrange_plan(world, self.plan_searcher, variables)

    def _arrange_plan(self, world: World, searcher: PlanSearcher, variables: Variables) -> Arrangement:
        searcher.calibrate(world.step_services.plan_constants)
        searcher.note_devices(world)
        plan = searcher.find_plan_or_wait(world.hosts)
        # A host that joins finds in its rehearsal which axes the others have now.
        axes = () if world.is_rehearsal else world.step_services.plan_axes
        if axes and list_plan_axes(plan) != axes:
            # As the leader decided. With other devices than it knew of they may not fit: then on all hosts alike.
            plan = searcher.find_plan_with_axes(world.hosts, axes) or plan
        self._record_plan(world, plan)
        found = searcher.make_arrangement(plan, world.local_devices, variables)
        return found.on_mesh(world.mesh(found.replica_shape)) if found.spans_hosts else found

    def _arrange_mesh(self, world: World, given: Mapping[str, int], variables: Variables) -> Arrangement:
        sizes = {axis: given.get(axis.value, 1) for axis in REPLICA_AXES}
        num_devices, width = math.prod(sizes.values()), max(count_devices_by_host(world.devices))
        if num_devices % width:
            raise CallerError(
                f"parallelism: found axes {dict(given)} for hosts of {width} devices, expected sizes that multiply to "
                f"those of one host or several: {width}, {2 * width}, ..."
            )
        shape = ReplicaShape(hosts=num_devices // width, axes=name_axes(sizes))
        return Arrangement(
            replica_shape=shape,
            placement=ParameterPlacement(world.mesh(shape), self._find_specs(sizes, variables)),
            spans_hosts=True,
        )

    def _find_specs(self, sizes: Mapping[Axis, int], variables: Variables) -> ParameterSpecs:
        if self._specs is None:  # the same in every generation
            recipe, batch = self._config.recipe, make_abstract(self._config.data.batch(0, 0))
            rules = self._config.parallelism.logical_axis_rules
            tensors = list_state_tensors(
                self._config.model, recipe.trace_loss, batch, logical_axis_rules=rules
            )
            _check_names(tensors, sizes)
            self._specs = list_parameter_specs(StatePartitioner(tensors, sizes, rules), variables)
        return self._specs

    def _arrange_stages(self, world: World) -> Arrangement:
        counts = set(count_devices_by_host(world.devices))
        found = {count: make_replica_axes(self._fit_stage_axes(world, count).sizes) for count in counts}
        own = found[len(world.local_devices)]
        sizes = tuple(size for _, size in own)
        devices = np.array(world.local_devices[: math.prod(sizes)]).reshape(sizes)
        shape = ReplicaShape(axes=own)
        if len(found) > 1 or devices.size < len(world.local_devices):
            shape = ReplicaShape(per_host="devices", axes_by_devices=tuple(sorted(found.items())))
        return Arrangement(
            replica_shape=shape,
            placement=ReplicatedPlacement(Mesh(devices, tuple(name for name, _ in own))),
        )

    def fit_own_axes(self, world: World) -> StageAxes:
        """Return the axes of the devices of this host of a pipeline: as given, as planned, or what it can have of them.

        They are planned once, for all hosts of the topology, since the bits of a result depend on them.

        Raises:
            CallerError: no plan fits; this host has other devices than given or planned.
        """
        return self._fit_stage_axes(world, len(world.local_devices))

    def _fit_stage_axes(self, world: World, num_devices: int) -> StageAxes:
        pipeline = self._config.parallelism.pipeline
        assert pipeline is not None
        if self.plan_searcher is not None:
            if self._stage_plan is None:
                self._stage_plan = self.plan_searcher.find_stage_plan(pipeline.num_stages)
            found = {axis.value: self._stage_plan.axis_sizes[axis] for axis in STAGE_PLAN_AXES}
            pipeline = dataclasses.replace(pipeline, axis_sizes=found)
        counts = dict(zip(world.hosts, count_devices_by_host(world.devices), strict=True))
        is_fewer = num_devices < max(counts.values())
        # Later, and in a job whose state was lost, all hosts may have lost as many.
        is_first = world.is_fresh and world.generation <= FIRST_GENERATION
        return fit_stage_axes(
            pipeline,
            num_devices,
            next(host for host, count in counts.items() if count == num_devices),
            num_examples=self._config.num_shared_examples,
            can_reduce=not self.why_equal_stages and (is_fewer or not is_first),
        )

    def _record_plan(self, world: World, plan: AnyPlan) -> None:
        if world.is_rehearsal:
            return  # the host says which plan it has when it joins
        last, self._last = self._last, plan
        if last is None or last.shape != plan.shape:
            world.record_event(
                EventKind.PLAN_CHOSEN,
                plan=plan.shape,
                before=last.shape if last is not None else "",
                axes=AXES_UNEQUAL if isinstance(plan, UnequalPlan) else AXES_EQUAL,
                step_s=plan.step_time_s,
                kept_step_s=self._estimate_kept_step_s(world, last),
                reason=plan.reason,
            )

    def _estimate_kept_step_s(self, world: World, last: AnyPlan | None) -> float:
        """Return the seconds of a step of these hosts with the axes of another plan; 0: there are none."""
        if last is None or self.plan_searcher is None or last is self._stage_plan:
            return 0.0
        return estimate_step_s(self.plan_searcher, world.hosts, last)


def _check_names(tensors: Sequence[StateTensor], sizes: Mapping[Axis, int]) -> None:
    """Check that a replica's axes take the named dims.

    Raises:
        CallerError: the axis of a name is none of a replica, or does not divide a dim that it is to shard.
    """
    for tensor in tensors:
        for name, axis in zip(tensor.logical_names, tensor.axes, strict=True):
            if axis is not None and axis not in sizes:
                raise CallerError(
                    f"parallelism: found the logical name {name!r} of {tensor.path} for the axis {axis}, expected one "
                    f"of {', '.join(sizes)}, or None. Change LogicalAxisRules(mesh_axes=)"
                )
    rules = make_divisibility_rules(tensors, num_layers=1, sequence_tokens=None)
    for axis in {rule.axis for rule in rules}:  # of an axis without a dim the partitioner says so
        if misfits := find_violated_rules(rules, axis, sizes[axis]):
            named = ", ".join(f"{rule.logical_name} = {rule.dim_size}" for rule in misfits)
            raise CallerError(
                f"parallelism: found axes with {axis} {sizes[axis]}, expected a size that divides the dims with names "
                f"for it: {named}. Choose another, or give these names no axis: LogicalAxisRules(mesh_axes=)"
            )
