"""Where the units of a model that is cut into blocks are in one generation: on the hosts of its replicas.

Snapshots, parity and restores see an array of a unit as one that is sharded over hosts: its holders have all of it, the
others nothing (`sharding.holder_sharding`). On each holder it is sharded over the host's devices, as the programs of
its stage take it (`sharding.stage_sharding`).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.model_weights import Weights, list_leaf_specs
from resilient_jax.checkpoint.part_plan import LeafPlace, StoredState
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.pipeline.block_state import UnitState, is_spec, make_unit_specs, place_unit
from resilient_jax.pipeline.stage_assignment import follow_stages
from resilient_jax.pipeline_schedule.rerouting import find_living_holders
from resilient_jax.pipeline_schedule.routes import Routes, Team, find_holders, list_stages, make_routes
from resilient_jax.pipeline_schedule.teams import (
    combine_speeds,
    find_device_speeds,
    make_teams,
    share_microbatches,
)
from resilient_jax.sharding.holder_sharding import (
    make_absent_mesh,
    make_holder_array,
    make_holder_mesh,
    make_non_addressable_array,
    read_holder_array,
)
from resilient_jax.sharding.placements import ParameterPlacement
from resilient_jax.sharding.stage_sharding import StageSharding, make_stage_mesh
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.step.assignment import ReplicaShape
from resilient_jax.trainer.parameter_ema import find_ema_params
from resilient_jax.trainer.training_state import TrainingState, Tree
from resilient_jax.trainer.unit_states import PipelinedState, UnitStates
from resilient_jax.worker.world import World

UNIT_PATTERN: Final = re.compile(r"^\.units\[(\d+)\]")
"""Of a leaf's path in a `PipelinedState`."""


class UnitPlacement:
    """The replicas of one generation, and the state as it is on their hosts.

    Attributes:
        stage_hosts: the hosts in the order in which hosts make replicas; the same on every host.
        teams: the replicas, with hosts whose stages are kept for them.
        absent: hosts whose stages are kept. Their replicas compute nothing; other hosts of these replicas keep their
            blocks up to date.
        quotas: microbatches of each replica in a step that begins in this generation.
        routes: routes of the microbatches of such a step.
        holders: hosts that are there and have each block.
        unit_holders: hosts that are there and have each unit.
        block_costs: the relative time of each block.
        num_stages: hosts of a replica, as the job was started with.
        device_speeds: speeds of hosts that use fewer devices than others, as parts of the speed of the others.
        sharding: sharding over the devices of this host.
    """

    def __init__(
        self,
        world: World,
        states: UnitStates,
        sharding: StageSharding,
        block_costs: Sequence[float],
        num_stages: int,
        num_microbatches: int,
        shape: ReplicaShape,
    ) -> None:
        """Divide the model among the hosts.

        Args:
            sharding: sharding over the devices of this host, without devices; other hosts may have other axes.
            block_costs: relative times of the blocks.
            num_stages: hosts of a replica.
            shape: shape with the axes of each host's devices.
        """
        self.world, self.block_costs, self.num_stages = world, tuple(block_costs), num_stages
        self._devices = list_used_devices(world, shape)
        self._has_unequal_axes = len({axes for _, axes in shape.axes_by_devices}) > 1
        self.sharding = sharding.with_mesh(make_stage_mesh(sharding.mesh, self._devices[world.host]))
        self.device_speeds = find_device_speeds({host: len(own) for host, own in self._devices.items()})
        speeds = combine_speeds(world.step_services.layer_speeds, self.device_speeds)
        groups = (*world.step_services.earlier_stage_hosts, world.step_services.stage_hosts)
        self.stage_hosts = follow_stages(groups, block_costs, num_stages)
        self.absent = frozenset(self.stage_hosts).difference(world.hosts)
        self.teams: list[Team] = make_teams(self.stage_hosts, block_costs, num_stages, speeds)
        self.quotas = share_microbatches(self.teams, num_microbatches, self.absent, self.device_speeds)
        self.routes: Routes = make_routes(self.teams, self.quotas)
        self.holders = find_living_holders(find_holders(self.teams), self.absent)
        self._states = states
        self._unit_specs = [
            make_unit_specs(unit, state, sharding)
            for unit, state in zip(states.units, states.abstract, strict=True)
        ]
        self._spec_by_path = {
            f".units[{number}]{jax.tree_util.keystr(path)}": spec
            for number, specs in enumerate(self._unit_specs)
            for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
        }
        table = states.units[0].table
        self._whole = ParameterPlacement(
            sharding.mesh, list_leaf_specs(table, table.weights, sharding.find_weight_spec)
        )
        self._meshes: dict[frozenset[HostName], Mesh] = {}
        self.unit_holders = [self.list_holders(number) for number in range(len(states.units))]
        self.held = sorted(self.list_units_by_host()[world.host])
        """The units of this host."""

    def set_quotas(self, quotas: Sequence[int]) -> None:
        """Have the replicas compute so many microbatches each from the next step on; the same on all hosts."""
        self.quotas, self.routes = tuple(quotas), make_routes(self.teams, quotas)

    def describe_work(self) -> dict[HostName, str]:
        """Return what each live host does: those with the same blocks and as many devices take as long."""
        blocks = _describe_blocks(self.teams)
        return {host: f"{blocks[host]} on {len(own)}" for host, own in self._devices.items()}

    def describe(self) -> str:
        """Return the replicas for people: hosts, each with its first and last block."""
        blocks = _describe_blocks(self.teams)
        away = {host: " (away)" for host in self.absent}
        most = max(map(len, self._devices.values()))
        away |= {host: f" ({len(self._devices[host])} of {most} devices)" for host in self.device_speeds}
        return "; ".join(
            " -> ".join(f"{host} {blocks[host]}{away.get(host, '')}" for host, _ in team)
            for team in self.teams
        )

    # The state.

    def __call__(self, path: str, leaf: object) -> NamedSharding:
        """Return the sharding of a leaf of a `PipelinedState`; `path` is as `jax.tree_util.keystr` writes it."""
        found = UNIT_PATTERN.match(path)
        hosts = self.list_holders(int(found[1])) if found else frozenset(self.world.hosts)
        return NamedSharding(self._make_mesh(hosts), self._spec_by_path.get(path, P()))

    def list_holders(self, unit: int) -> frozenset[HostName]:
        """Return the hosts that have a unit."""
        return self._states.units[unit].list_holders(self.holders)

    def list_units_by_host(self) -> dict[HostName, set[int]]:
        """Return the units that each host is to have."""
        found: dict[HostName, set[int]] = {host: set() for host in self.world.hosts}
        for number in range(len(self._states.units)):
            for host in self.list_holders(number):
                found[host].add(number)
        return found

    def init_state(self, init: Callable[[], TrainingState]) -> PipelinedState:
        """Return the initial state. Only the units of this host are computed; the others take no memory here."""

        def init_held() -> tuple[dict[int, UnitState], Any]:
            state = init()
            units = {number: self._states.init_unit(number, state.variables) for number in self.held}
            return units, state.early_stopping

        units: dict[int, UnitState]
        if self._has_unequal_axes:
            units, early_stopping = _init_by_unit(self._states, self.held, init, self.place_unit)
        else:
            # On a host's devices no array is ever larger than its shards.
            units, early_stopping = jax.jit(init_held, out_shardings=self._list_init_shardings())()
        absent: tuple[UnitState, ...] = jax.tree.map(
            lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), self._states.abstract
        )
        return PipelinedState(
            step=jax.numpy.zeros((), jax.numpy.int32),
            units=tuple(units.get(number, unit) for number, unit in enumerate(absent)),
            early_stopping=early_stopping,
        )

    def _list_init_shardings(self) -> Any:  # noqa: ANN401 - of a tree and of what is not sharded
        if self.sharding.mesh.size == 1:
            return None
        units = {
            number: jax.tree.map(self.sharding.place, self._unit_specs[number], is_leaf=is_spec)
            for number in self.held
        }
        return units, self.sharding.place(P())

    def read_held(self, state: PipelinedState) -> dict[int, UnitState]:
        """Return the units of this host, as arrays on its devices."""
        return {number: self.read_local(state.units[number]) for number in self.held}

    def read_local(self, tree: Tree) -> Tree:
        """Return this host's copies of arrays, of which it has all; None in place of one that it has not."""
        local = self.sharding.mesh
        assert isinstance(local, Mesh)
        return jax.tree.map(lambda array: read_holder_array(array, local), tree)

    def place_unit(self, number: int, state: UnitState) -> UnitState:
        """Return the state of a unit on this host's devices."""
        return place_unit(self._states.units[number], state, self.sharding)

    def list_weights(self, state: PipelinedState, *, use_ema: bool = False) -> dict[int, Weights]:
        """Return the weights of each block that this host has, by name, as arrays on its device.

        Args:
            use_ema: True: the average of the parameters in place of the parameters.
        """
        found: dict[int, dict[str, Any]] = {
            block: {} for block, hosts in enumerate(self.holders) if self.world.host in hosts
        }
        for number, held in self.read_held(state).items():
            unit = self._states.units[number]
            own = dict(held.weights)
            if use_ema:
                own |= unit.split(find_ema_params(held.opt_state))
            for block in found.keys() & set(unit.blocks):
                found[block] |= own
        return dict(found)

    def make_state(self, step: int, units: Mapping[int, UnitState], early_stopping: Tree) -> PipelinedState:
        """Return the state of all hosts, of the units of this one and of what every host has."""
        shape = self._states.abstract
        return PipelinedState(
            step=self.replicate(np.int32(step)),
            units=tuple(
                self._make_unit(number, units[number] if number in units else shape[number])
                for number in range(len(shape))
            ),
            early_stopping=early_stopping,
        )

    def replicate(self, value: Any) -> jax.Array:  # noqa: ANN401 - a number or array
        """Return an array that every host has."""
        local = jax.device_put(value, self.sharding.place(P()))
        return make_holder_array(local, self._make_mesh(frozenset(self.world.hosts)), P())

    def split(self, state: TrainingState) -> PipelinedState:
        """Return the state of the whole model, of which each host has what it needs, by unit."""
        local = self.read_local(state)
        units = {number: self.place_unit(number, self._states.split(number, local)) for number in self.held}
        return self.make_state(int(local.step), units, jax.tree.map(self.replicate, local.early_stopping))

    def describe_stored(self, state: PipelinedState, abstract: TrainingState) -> StoredState:
        """Return the state of the whole model as checkpoints have it, of which the units are parts."""
        places = {
            f".units[{number}]{path}": place
            for number in range(len(state.units))
            for path, place in self._states.list_places(number)
        }
        places |= {
            leaf.path: LeafPlace(leaf.path) for leaf in flatten_state(0, state._replace(units=())).leaves
        }
        held = [leaf for leaf in flatten_state(0, state).leaves if leaf.path in places]
        return StoredState(abstract, held, [places[leaf.path] for leaf in held])

    def place_whole(self, path: str, leaf: Any) -> NamedSharding:  # noqa: ANN401 - the shape of an array
        """Return the sharding of a leaf of the whole model's state, as read from storage: on the hosts that need it."""
        holders = self._states.find_units_of_leaf(path)
        hosts: Collection[HostName] = self.world.hosts
        if holders:
            hosts = frozenset().union(*map(self.list_holders, holders))
        return NamedSharding(self._make_mesh(frozenset(hosts)), self._whole.partition_spec(path, leaf))

    def _make_unit(self, number: int, values: UnitState) -> UnitState:
        mesh = self._make_mesh(self.list_holders(number))
        make = make_holder_array if number in self.held else make_non_addressable_array
        return jax.tree.map(
            lambda spec, value: make(value, mesh, spec), self._unit_specs[number], values, is_leaf=is_spec
        )

    def _make_mesh(self, hosts: frozenset[HostName]) -> Mesh:
        if hosts not in self._meshes:
            local = self.sharding.mesh
            assert isinstance(local, Mesh)
            # In the order of hosts, the same everywhere.
            having = [host for host in self.world.hosts if host in hosts]
            self._meshes[hosts] = (
                make_holder_mesh(having, self.world.host, local)
                if self.world.host in hosts
                else make_absent_mesh(having, self._devices[having[0]][0], local)
            )
        return self._meshes[hosts]


def list_used_devices(world: World, shape: ReplicaShape) -> dict[HostName, list[Device]]:
    """Return the devices of each host that its axes use. Of one that lost devices some may be left over."""
    found: dict[HostName, list[Device]] = {host: [] for host in world.hosts}
    for device in world.devices:
        found[world.host_of_device(device)].append(device)
    return {
        host: devices[: math.prod(size for _, size in shape.for_host(len(devices)).axes)]
        for host, devices in found.items()
    }


def _init_by_unit(
    states: UnitStates,
    numbers: Sequence[int],
    init: Callable[[], TrainingState],
    place: Callable[[int, UnitState], UnitState],
) -> tuple[dict[int, UnitState], Any]:
    """Return the initial state of these units, and of early stopping, where hosts have unequal axes.

    Each is made by the same program on all its holders, so they have the same bits; one at a time is on one device.
    """
    units: dict[int, UnitState] = {}
    for number in numbers:
        made = jax.jit(lambda number=number: states.init_unit(number, init().variables))()
        units[number] = place(number, made)
    return units, jax.jit(lambda: init().early_stopping)()


def _describe_blocks(teams: Sequence[Team]) -> dict[HostName, str]:
    """Return what blocks each host has, such as "0-3"."""
    return {host: f"{blocks[0]}-{blocks[-1]}" for host, blocks in list_stages(teams)}
