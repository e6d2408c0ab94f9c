"""Which replicas compute the steps of a generation, how their arrays are placed, and the search for a plan of it."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError, TooFewHosts
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.planning.axes import Axis, AxisSizes
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import (
    HostUse,
    PlanConstraints,
    PlanRequest,
    constrain_to_hosts,
    constrain_to_stages,
    make_request,
)
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import search_best
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.planning.unequal_search import make_host_axes_plan, search_host_axes_plan
from resilient_jax.program_analysis.program_analysis import analyze_program
from resilient_jax.protocol.plan_records import ANY_NUMBER, PlanAxes, PlanConstants
from resilient_jax.sharding.partition_specs import StatePartitioner
from resilient_jax.sharding.placements import REPLICA_AXIS, ParameterPlacement, ParameterSpecs, Placement
from resilient_jax.step.assignment import MeshAxes, ReplicaShape, count_devices_by_host
from resilient_jax.topology import Topology, load_topology
from resilient_jax.trainer.accumulation import make_abstract
from resilient_jax.trainer.fit_config import MESH_AXES, FitConfig
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.planner import allows_axes_by_host
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)

REPLICA_AXES: Final = tuple(map(Axis, MESH_AXES))
WHY_OFF: Final = "axes_by_host is off. Planner(axes_by_host=True) allows others"
"""Why hosts have the same axes where the planner does not allow others."""
AnyPlan = Plan | UnequalPlan
"""One whose replicas are equal, or one of teams, of the hosts with each number of devices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the steps of one generation are computed.

    Attributes:
        replica_shape: hosts and axes of each replica.
        placement: placement of parameters and sums on this host's devices; of `spans_hosts` on those of all replicas.
        plan: plan that the arrangement follows; None: without a planner.
        spans_hosts: whether a replica is whole hosts, one or several, that share one copy of the state in shards.
    """

    replica_shape: ReplicaShape
    placement: Placement
    plan: AnyPlan | None = None
    spans_hosts: bool = False

    def on_mesh(self, mesh: Mesh) -> "Arrangement":
        """Return the same arrangement with its arrays on a mesh of all replicas."""
        return dataclasses.replace(self, placement=self.placement.with_mesh(mesh))

    @property
    def is_sharded_on_host(self) -> bool:
        """Whether a plan's replicas have several devices here, each with a part of the state."""
        mesh = self.placement.mesh
        return self.plan is not None and not self.spans_hosts and mesh.size > mesh.shape[Axis.REPLICA.value]


class _PlanCache(NamedTuple):
    """What was found by some constants: the best plans by hosts and their devices, others also by axes.

    Attributes:
        plans: the best ones; where no plan fits, why.
    """

    calibration: Calibration
    plans: dict[tuple[tuple[HostName, int], ...], AnyPlan | PlanError]
    plans_with_axes: dict[tuple[object, ...], AnyPlan | None]


class PlanSearcher:
    """Searches plans for one program, and turns them into arrangements; caches the plans found.

    Attributes:
        why_equal: why all hosts must have the same axes, and what to change, in words; "": hosts may differ.
    """

    def __init__(self, config: FitConfig) -> None:
        assert config.planner is not None
        self._config, self._planner = config, config.planner
        topology = self._planner.topology
        self._topology = topology if isinstance(topology, Topology) else load_topology(Path(topology))
        self.why_equal = WHY_OFF
        self._program_cost: ProgramCost | None = self._planner.program_cost
        self._specs: dict[tuple[int, ...], ParameterSpecs] = {}
        self._found: dict[HostName, int] = {}
        """The devices of hosts that were in the job."""
        self._cache = _PlanCache(self._planner.calibration, {}, {})
        """Replaced as one, because threads of the generation before may still search."""

    @functools.cached_property
    def spans_hosts(self) -> bool:
        """Whether replicas are whole hosts, during the whole job; the same on all hosts."""
        if self._planner.spans_hosts is not None:
            return self._planner.spans_hosts
        if len({host.devices for host in self._topology.hosts}) > 1:
            return False  # hosts that differ have teams with other axes, or an error that says why not
        request = self._make_request(self._topology, self._planner.calibration)
        inside, spanning = (
            self._constrain(self._planner.axis_sizes, use) for use in (HostUse.INSIDE, HostUse.SPANNING)
        )
        return not _has_plan(request, inside) and _has_plan(request, spanning)

    @functools.cached_property
    def allows_axes_by_host(self) -> bool:
        """Whether hosts may have other axes, if the update allows it; the same on all hosts. Needs devices."""
        return not self.spans_hosts and allows_axes_by_host(
            self._planner, self._topology, jax.default_backend()
        )

    def forbid_axes_by_host(self, why_mesh_bound: str) -> None:
        """Note for the plans from now on why the update needs equal axes; "": it does not."""
        self.why_equal = "" if self.allows_axes_by_host else WHY_OFF
        if self.allows_axes_by_host and why_mesh_bound:
            self.why_equal = f"{why_mesh_bound}, whose bits depend on them. Another optimizer allows others"

    def calibrate(self, constants: PlanConstants) -> None:
        """Search by these constants from now on; without any, by those that were given."""
        calibration = dataclasses.replace(self._planner.calibration, **dict(constants))
        if calibration != self._cache.calibration:
            self._cache = _PlanCache(calibration, {}, {})

    def find_plan(self, hosts: tuple[HostName, ...]) -> AnyPlan:
        """Return the best plan for these hosts; of unequal teams where hosts have unequal numbers of devices.

        Raises:
            CallerError: a host is not in the topology; no plan fits.
        """
        unknown = sorted(set(hosts) - {host.name for host in self._topology.hosts})
        if unknown:
            raise CallerError(
                f"planner: found the hosts {', '.join(unknown)}, expected names of topology {self._topology.name} "
                f"({self._topology.hosts[0].name}, ...). Start agents with --host-name as in the topology, or add "
                "the hosts there"
            )
        return self._find_plan(self._count_devices(hosts))

    def _find_plan(self, counts: Mapping[HostName, int]) -> AnyPlan:
        """Return the best plan for hosts with so many devices.

        Raises:
            PlanError: no plan fits.
        """
        key, cache = tuple(counts.items()), self._cache
        if key not in cache.plans:
            request = self._make_request(_restrict_topology(self._topology, counts), cache.calibration)
            try:
                constraints = self._constrain(self._planner.axis_sizes)
                cache.plans[key] = _search_plan(
                    request, constraints, self.why_equal, are_equal=self.spans_hosts
                )
            except PlanError as error:  # these hosts may come again and again, until there are more
                cache.plans[key] = error
        found = cache.plans[key]
        if isinstance(found, PlanError):
            raise found.with_traceback(None)
        return found

    def find_plan_or_wait(self, hosts: tuple[HostName, ...]) -> AnyPlan:
        """Return what `find_plan` does for the hosts of a generation, which wait for more if these are too few.

        Raises:
            CallerError: as of `find_plan`.
            TooFewHosts: no plan fits these, and one would fit more hosts of the topology.
        """
        try:
            return self.find_plan(hosts)
        except PlanError as error:
            absent = [host for host in self.all_hosts if host not in hosts] if self.spans_hosts else []
            for number in range(1, len(absent) + 1):
                # As the topology has them: what other hosts had lost, not every host has seen.
                counts = self._count_devices(hosts) | {
                    host: self._topology.host(host).devices for host in absent[:number]
                }
                with contextlib.suppress(PlanError):
                    self._find_plan(counts)
                    needed = len(hosts) + number
                    raise TooFewHosts(f"{error}. {needed} hosts of it suffice", needed) from error
            raise

    def find_plan_with_axes(self, hosts: tuple[HostName, ...], axes: PlanAxes) -> AnyPlan | None:
        """Return the plan for these hosts whose replicas have such axes; None: none fits."""
        counts = self._count_devices(hosts)
        key, cache = (*counts.items(), axes), self._cache
        if key not in cache.plans_with_axes:
            request = self._make_request(_restrict_topology(self._topology, counts), cache.calibration)
            by_devices = {number: self._constrain(dict(sizes)) for number, sizes in axes}
            cache.plans_with_axes[key] = _try_axes(request, by_devices)
        return cache.plans_with_axes[key]

    def list_incomplete(self) -> tuple[HostName, ...]:
        """Return the hosts that were found with fewer devices than the topology gives them."""
        found = list(self._found.items())  # at once: the members may change meanwhile
        return tuple(host for host, count in found if count < self._topology.host(host).devices)

    def group_alike(self, hosts: tuple[HostName, ...]) -> list[tuple[HostName, ...]]:
        """Return the hosts in groups in which it makes no difference to a plan which one is lost."""
        groups: dict[object, list[HostName]] = {}
        for name, count in self._count_devices(hosts).items():
            host = self._topology.host(name)
            groups.setdefault((host.accelerator, count, host.device_speeds, host.speed), []).append(name)
        return [tuple(names) for names in groups.values()]

    def list_failure_domains(self, hosts: tuple[HostName, ...]) -> list[tuple[HostName, ...]]:
        """Return which of these hosts may be lost as one, such as those of a rack: never all, from the inside out."""
        levels = self._topology.failure_levels[1:]
        domains = [set(domain.hosts) for level in levels for domain in self._topology.domains(level)]
        found = [tuple(host for host in hosts if host in domain) for domain in domains]
        return [domain for domain in found if 0 < len(domain) < len(hosts)]

    def _count_devices(self, hosts: tuple[HostName, ...]) -> dict[HostName, int]:
        return {host: self._found.get(host, self._topology.host(host).devices) for host in hosts}

    def _make_request(self, topology: Topology, calibration: Calibration) -> PlanRequest:
        batch = self._config.global_batch
        return make_request(self.program_cost, topology, global_batch=batch, calibration=calibration)

    def _constrain(self, axes: AxisSizes, host_use: HostUse | None = None) -> PlanConstraints:
        """Return the constraints of this job's plans, or of plans that use hosts in another way."""
        use = host_use or (HostUse.SPANNING if self.spans_hosts else HostUse.FILLED)
        return constrain_to_hosts(axes, self._config.microbatch_size, self._config.num_shared_examples, use)

    def find_stage_plan(self, num_stages: int) -> Plan:
        """Return the best plan of pipelines with so many stages, each on a host, for all hosts of the topology.

        Raises:
            PlanError: no plan fits.
        """
        config, axes = self._config, self._planner.axis_sizes
        constraints = constrain_to_stages(
            self._topology, num_stages, axes, config.microbatch_size, config.num_shared_examples
        )
        return search_best(self._make_request(self._topology, self._cache.calibration), constraints)[0]

    @property
    def all_hosts(self) -> tuple[HostName, ...]:
        """The hosts of the topology, which may join the job."""
        return tuple(host.name for host in self._topology.hosts)

    @property
    def program_cost(self) -> ProgramCost:
        """The cost of the program; analyzed at the first access."""
        if self._program_cost is None:
            recipe = self._config.recipe
            self._program_cost = analyze_program(
                self._config.model,
                recipe.trace_loss,
                make_abstract(self._config.data.batch(0, 0)),
                name=type(self._config.model).__name__,
                optimizer=recipe.optimizer,
                logical_axis_rules=self._planner.logical_axis_rules,
            )
        return self._program_cost

    def note_devices(self, world: World) -> None:
        """Note how many devices the live hosts have, for the plans from now on; fewer than the topology says are lost.

        Raises:
            CallerError: a host has more devices than in the topology.
        """
        for host, found in zip(world.hosts, count_devices_by_host(world.devices), strict=True):
            if host not in {one.name for one in self._topology.hosts}:
                continue  # refused by `find_plan`
            expected = self._topology.host(host).devices
            if found > expected:
                raise CallerError(
                    f"planner: found {found} devices on host {host}, expected {expected} by topology "
                    f"{self._topology.name}. Change --devices-per-host, or the topology"
                )
            if found < expected and self._found.get(host) != found and world.host == host:
                logger.warning(
                    "planner: %s has %d of the %d devices that topology %s gives it, and plans are made for those",
                    host,
                    found,
                    expected,
                    self._topology.name,
                )
            self._found[host] = found

    def make_arrangement(self, plan: AnyPlan, devices: list[Device], variables: Variables) -> Arrangement:
        """Return the arrangement that a plan gives a host with these devices; of `spans_hosts` on an abstract mesh."""
        by_devices = _list_axes_by_devices(plan)
        sizes = by_devices[len(devices)] if isinstance(plan, UnequalPlan) else next(iter(by_devices.values()))
        key = tuple(sizes.values())
        if key not in self._specs:
            partitioner = StatePartitioner(self.program_cost.tensors, sizes, self._planner.logical_axis_rules)
            self._specs[key] = list_parameter_specs(partitioner, variables)
        specs = self._specs[key]
        if self.spans_hosts:
            assert isinstance(plan, Plan), "whole hosts have equal replicas"
            return _arrange_over_hosts(plan, sizes, specs)
        axes = name_axes(sizes)
        width = math.prod(sizes.values())
        # Where a replica is one device, the state is on as many devices of each host: see `World.local_mesh`. Else a
        # replica's devices share its shards, so the state is on all replicas.
        fewest = min(by_devices)
        per_host = min(len(devices), fewest) if width == 1 else len(devices) // width
        # Consecutive devices form a replica.
        grid = np.array(devices[: per_host * width]).reshape((per_host, *sizes.values()))
        mesh = Mesh(grid, (Axis.REPLICA.value, *(name for name, _ in axes)))
        shape = ReplicaShape(per_host="devices", axes=axes)
        if isinstance(plan, UnequalPlan):
            named = tuple((number, name_axes(found)) for number, found in sorted(by_devices.items()))
            shape = ReplicaShape(per_host="devices", axes_by_devices=named)
        return Arrangement(
            replica_shape=shape,
            placement=ParameterPlacement(mesh, specs),
            plan=plan,
        )


def _search_plan(
    request: PlanRequest, constraints: PlanConstraints, why_equal: str, *, are_equal: bool
) -> AnyPlan:
    """Return the best plan; of unequal teams where hosts have unequal numbers of devices.

    Args:
        why_equal: why all hosts need the same axes; "": they do not.
        are_equal: whether they have them in any case.

    Raises:
        PlanError: no plan fits.
    """
    are_equal = are_equal or len({host.devices for host in request.topology.hosts}) == 1
    try:
        equal = search_best(request, constraints)[0]
    except PlanError as error:
        if are_equal:
            raise
        if why_equal:
            raise PlanError(f"{error}. All hosts have the same axes: {why_equal}") from error
        if (unequal := search_host_axes_plan(request, constraints)) is None:
            raise
        return unequal
    if are_equal:
        return equal
    if why_equal:
        reason = f"All hosts have the same axes: {why_equal}."
        return dataclasses.replace(equal, reasons=(*equal.reasons, reason))
    return search_host_axes_plan(request, constraints, equal_step_s=equal.step_time_s) or equal


def _restrict_topology(topology: Topology, counts: Mapping[HostName, int]) -> Topology:
    """Return the topology of these hosts with these numbers of devices."""
    absent = [host.name for host in topology.hosts if host.name not in counts]
    # Which of a host's devices are missing makes no difference to a plan.
    missing = [
        f"{host}/{device}"
        for host, count in counts.items()
        for device in topology.host(host).living_devices[count:]
    ]
    return topology.without(*absent, *missing) if absent or missing else topology


def estimate_step_s(searcher: PlanSearcher, hosts: tuple[HostName, ...], plan: AnyPlan) -> float:
    """Return the seconds of a step of these hosts with the axes of a plan for others; 0: no such plan fits."""
    found = searcher.find_plan_with_axes(hosts, list_plan_axes(plan))
    return found.step_time_s if found is not None else 0.0


def _has_plan(request: PlanRequest, constraints: PlanConstraints) -> bool:
    try:
        search_best(request, constraints)
    except PlanError:
        return False
    return True


def _arrange_over_hosts(plan: Plan, sizes: dict[Axis, int], specs: ParameterSpecs) -> Arrangement:
    """Return the arrangement of replicas that are whole hosts, on an abstract mesh of all replicas."""
    axes = name_axes(sizes)
    width = max(host.devices for host in plan.request.topology.hosts)
    mesh = AbstractMesh((plan.replicas, *sizes.values()), (REPLICA_AXIS, *(name for name, _ in axes)))
    return Arrangement(
        replica_shape=ReplicaShape(hosts=math.prod(sizes.values()) // width, axes=axes),
        placement=ParameterPlacement(mesh, specs),
        plan=plan,
        spans_hosts=True,
    )


def list_parameter_specs(partitioner: StatePartitioner, variables: Variables) -> ParameterSpecs:
    """Return path, shape and spec of each parameter, frozen ones too."""
    parameters = variables.params, variables.frozen
    specs = jax.tree.leaves(partitioner.specs(parameters), is_leaf=lambda node: isinstance(node, P))
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return tuple(
        # Of both the path in the model, which the paths of gradients and optimizer state end with.
        (jax.tree_util.keystr(path[1:]), tuple(leaf.shape), spec)
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    )


def _list_axes_by_devices(plan: AnyPlan) -> dict[int, dict[Axis, int]]:
    """Return the axes of a replica by the number of devices of its host."""
    plans = [team.plan for team in plan.teams] if isinstance(plan, UnequalPlan) else [plan]
    return {
        host.devices: {axis: one.axis_sizes[axis] for axis in REPLICA_AXES}
        for one in plans
        for host in one.request.topology.hosts
    }


def has_axes_for(plan: AnyPlan, num_devices: int) -> bool:
    """Return whether a host with so many devices may take part in a plan."""
    return isinstance(plan, Plan) or num_devices in _list_axes_by_devices(plan)


def list_plan_axes(plan: AnyPlan) -> PlanAxes:
    """Return the axes of a replica of a plan; of one whose replicas are equal, whatever the devices of a host."""
    by_devices = _list_axes_by_devices(plan)
    if isinstance(plan, Plan):
        by_devices = {ANY_NUMBER: next(iter(by_devices.values()))}
    return tuple((number, name_axes(sizes)) for number, sizes in sorted(by_devices.items()))


def _try_axes(request: PlanRequest, by_devices: Mapping[int, PlanConstraints]) -> AnyPlan | None:
    """Return the plan whose replicas have given axes, by the number of devices of their hosts; None: none fits."""
    counts = {host.devices for host in request.topology.hosts}
    is_any = ANY_NUMBER in by_devices
    if not is_any and not counts <= by_devices.keys():
        return None
    if not is_any and len(counts) > 1:
        return make_host_axes_plan(request, by_devices)
    try:
        return search_best(request, by_devices[ANY_NUMBER if is_any else min(counts)])[0]
    except PlanError:
        return None


def name_axes(sizes: Mapping[Axis, int]) -> MeshAxes:
    """Return names and sizes of axes."""
    return tuple((axis.value, size) for axis, size in sizes.items())
