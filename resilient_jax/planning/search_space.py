"""Which candidates a request and its constraints allow: sizes of axes, microbatches, numbers of replicas, layouts."""

import collections
from collections.abc import Iterable, Mapping

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig
from resilient_jax.planning.plan_request import HostUse, PlanConstraints
from resilient_jax.planning.tensor_partition import find_axis_sizes, find_divisors
from resilient_jax.topology import Topology


class SearchSpace:
    """The candidates of one request under its constraints; each rule is here once."""

    def __init__(self, cost_model: CostModel, constraints: PlanConstraints) -> None:
        self.cost_model, self.constraints = cost_model, constraints
        self._request = cost_model.request
        self._num_stages = _count_stages(cost_model.request.topology, constraints.host_use)

    @property
    def shared_examples(self) -> int:
        """The number that FSDP divides."""
        given = self.constraints
        return given.shared_examples or given.microbatch_size or self._request.global_batch

    def list_axis_sizes(self, axis: Axis) -> list[int]:
        """Return the sizes of an axis of a replica that the program, the batch and the constraints allow."""
        if axis is Axis.FSDP:
            sizes = find_divisors(self.shared_examples)
        else:
            sizes = find_axis_sizes(self._request.program_cost, axis, self.cost_model.devices)
        return [size for size in sizes if size == self.constraints.axes.get(axis, size)]

    def list_microbatches(self, fsdp: int) -> list[MicrobatchConfig]:
        """Return the microbatches of each device that divide its part of the batch, the smallest first."""
        constraints, batch = self.constraints, self._request.global_batch // fsdp
        sizes: Iterable[int] = find_divisors(batch)
        remats = (False, True) if self._request.program_cost.can_remat else (False,)
        if constraints.microbatch_size is not None:
            sizes, remats = (constraints.microbatch_size // fsdp,), (False,)
        return [
            MicrobatchConfig(size, remat)
            for size in sizes
            if batch // size >= constraints.min_replicas
            for remat in remats
            if constraints.microbatch in (None, MicrobatchConfig(size, remat))
        ]

    def find_smallest_microbatch(self, fsdp: int) -> MicrobatchConfig | None:
        """Return the microbatch that needs the least memory; None: there is none."""
        found = self.list_microbatches(fsdp)
        return min(found, key=lambda one: (one.sequences, not one.remat), default=None)

    @property
    def is_free(self) -> bool:
        """Whether the devices of a stage may be anywhere, so that their number says nothing about that of replicas."""
        return self._num_stages is None

    def count_replicas(self, width: int, stages: int) -> int | None:
        """Return how many replicas a plan must have; None: any number, 0: there is no such plan.

        Args:
            width: devices of a stage.
            stages: pipeline stages of a replica.
        """
        given = self.constraints.axes.get(Axis.REPLICA)
        if self._num_stages is None:
            return given
        found = self._num_stages.get(width, 0) // stages
        return found if given in (None, found) else 0

    def allows_layout(self, layout: DeviceLayout) -> bool:
        """Return whether the devices of each stage are where they may be."""
        if self.is_free:
            return True
        if self.constraints.host_use is HostUse.SPANNING:
            return layout.axes_in_host.devices == self._request.pool.devices_per_host and layout.is_contiguous
        return layout.axes_in_host._replace(pipeline=1) == layout.axes._replace(pipeline=1)


def _count_stages(topology: Topology, host_use: HostUse) -> Mapping[int, int] | None:
    """Return how many stages all hosts have, by each number of devices that a stage may have; None: it may be anywhere.

    Of all hosts, also where only those with more memory are searched: each has a part in the step.
    """
    if host_use is HostUse.ANY:
        return None
    hosts = collections.Counter(host.devices for host in topology.hosts)
    fewest, most = min(hosts), max(hosts)
    if host_use is HostUse.SPANNING:
        return {number * most: hosts[most] // number for number in range(1, hosts[most] + 1)}
    widths: Iterable[int] = range(1, fewest + 1)
    if host_use is HostUse.WHOLE:
        widths = (fewest,)
    elif host_use is HostUse.FILLED and len(hosts) == 1:
        widths = find_divisors(fewest)
    return {width: sum(count * (devices // width) for devices, count in hosts.items()) for width in widths}
