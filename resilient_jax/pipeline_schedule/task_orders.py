"""The order of each host's tasks, and how long the step takes: an event-driven list scheduler.

1. A host that is free runs, of its tasks whose needs are done, the first by priority: backward and forward passes in
   turn, weight gradients when neither can run; pipelines that share the host in turn, each by microbatch. If none is
   ready it takes the one that is ready first.
2. Memory is bounded as in 1F1B: hop i of P begins a forward pass only while its host has fewer than P - i microbatches
   between forward and backward pass, those that are further from the loss not counted. With weight gradients in gaps,
   what waits for them counts, too, up to P on every host.
3. Orders of one simulation cannot deadlock, however long the tasks really take: sorted by start, all tasks together
   are a linear extension of one graph, so the first task that is not done always has what it needs.
4. The bound cannot block for ever: of the forward passes that it holds back, the one closest to the loss waits only for
   microbatches on its host that are closer still, and those need no forward pass that is held back.
"""

import heapq
from collections.abc import Callable, Collection, Mapping

import msgspec

from resilient_jax.errors import InternalError
from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.host_queue import HostQueue
from resilient_jax.pipeline_schedule.routes import Hop, Routes, validate_routes
from resilient_jax.pipeline_schedule.task_graph import TaskGraph
from resilient_jax.pipeline_schedule.tasks import Boundary, PipelineSchedule, Task, TaskKind

BlockSeconds = Callable[[HostName, TaskKind, int], float]
"""Time of a kind of task on a host for one block; a hop takes the sum over its blocks."""
TransferSeconds = Callable[[HostName, HostName], float]
"""Time from the end of a task until another host has its result."""


class TaskOrders(msgspec.Struct, frozen=True):
    """What each host does, in order, and how long that takes.

    Attributes:
        orders: for each host of the routes its tasks that are not done, in order.
        makespan_s: from the start to the end of the last task.
        busy_s: for each host the sum of its tasks' times.
        peak_in_flight: for each host the most hops at a time whose forward pass is begun and whose weight gradients are
            not done: their residuals are in memory.
    """

    orders: Mapping[HostName, tuple[Task, ...]]
    makespan_s: float
    busy_s: Mapping[HostName, float]
    peak_in_flight: Mapping[HostName, int]


def take_equal_time(_host: HostName, kind: TaskKind, _block: int) -> float:
    """Return the time of a task where all blocks and hosts are equal, or nothing was measured."""
    return 2.0 if kind is TaskKind.BACKWARD else 1.0


def order_tasks(
    routes: Routes,
    seconds: BlockSeconds,
    *,
    schedule: PipelineSchedule,
    done: Collection[Task] = frozenset(),
    arrived: Collection[Boundary] = frozenset(),
    transfer_s: TransferSeconds | None = None,
) -> TaskOrders:
    """Return the order of each host's tasks; the same on every host, from the same arguments.

    Args:
        routes: routes of all microbatches of the step.
        seconds: duration of a block's task on a host.
        schedule: says which tasks there are, and when weight gradients are computed.
        done: finished tasks, of hops of these routes.
        arrived: values that the hop that needs them has, whatever became of their sender: nothing waits for them. Each
            host must pass the same.
        transfer_s: time between two hosts; None: transfers take no time.

    Raises:
        RouteError: two routes of a microbatch, or a finished task of a hop that no route has.
    """
    graph = TaskGraph(validate_routes(routes), schedule, frozenset(done), frozenset(arrived))
    simulation = _Simulation(
        graph,
        {hop.host: HostQueue(schedule) for route in routes for hop in route.hops},
        transfer_s or _take_no_time,
    )
    return simulation.run(_HopSeconds(seconds))


def _take_no_time(_source: HostName, _destination: HostName) -> float:
    return 0.0


class _HopSeconds:
    """Times of tasks; those of a hop's blocks are added up once."""

    def __init__(self, seconds: BlockSeconds) -> None:
        self._seconds = seconds
        self._known: dict[tuple[Hop, TaskKind], float] = {}

    def find(self, task: Task) -> float:
        key = task.hop, task.kind
        if key not in self._known:
            self._known[key] = sum(
                self._seconds(task.hop.host, task.kind, block) for block in task.hop.blocks
            )
        return self._known[key]


class _Simulation:
    """All hosts at work on one graph, from time 0 on."""

    def __init__(
        self, graph: TaskGraph, queues: dict[HostName, HostQueue], transfer_s: TransferSeconds
    ) -> None:
        self._graph = graph
        self._queues = queues
        self._transfer_s = transfer_s
        self._missing = {task: len(needs) for task, needs in graph.needs.items()}
        self._ready_s = dict.fromkeys(graph.needs, 0.0)
        self._events: list[tuple[float, HostName]] = []  # a time when a host may have something to begin
        for task in graph.finished:
            if task.kind is not TaskKind.WEIGHT_GRADIENT or (task.microbatch, task.hop) not in graph.summed:
                queues[task.hop.host].record(task, graph.depths[task.microbatch, task.hop])
        for task in [task for task, missing in self._missing.items() if not missing]:
            self._release(task)
        for task in graph.finished:
            self._finish(task, 0.0)

    def run(self, hop_seconds: _HopSeconds) -> TaskOrders:
        orders: dict[HostName, list[Task]] = {host: [] for host in sorted(self._queues)}
        busy_s = dict.fromkeys(orders, 0.0)
        while self._events:
            now_s, host = heapq.heappop(self._events)
            queue = self._queues[host]
            if queue.free_s > now_s or (task := queue.take(now_s)) is None:
                continue  # the host looks again when it is free, or when something is ready
            orders[host].append(task)
            if task.kind is TaskKind.INPUT_GRADIENT and (task.microbatch, task.hop) in self._graph.summed:
                queue.end_weights()
            took_s = hop_seconds.find(task)
            busy_s[host] += took_s
            queue.free_s = now_s + took_s
            heapq.heappush(self._events, (queue.free_s, host))
            self._finish(task, queue.free_s)
        left = len(self._graph.needs) - sum(map(len, orders.values()))
        if left:
            raise InternalError(f"order_tasks: found {left} tasks that never became ready, expected none")
        return TaskOrders(
            orders={host: tuple(tasks) for host, tasks in orders.items()},
            makespan_s=max((queue.free_s for queue in self._queues.values()), default=0.0),
            busy_s=busy_s,
            peak_in_flight={host: self._queues[host].peak_in_flight for host in orders},
        )

    def _finish(self, task: Task, end_s: float) -> None:
        for user in self._graph.users.get(task, ()):
            arrives_s = end_s
            if user.hop.host != task.hop.host:
                arrives_s += self._transfer_s(task.hop.host, user.hop.host)
            self._ready_s[user] = max(self._ready_s[user], arrives_s)
            self._missing[user] -= 1
            if not self._missing[user]:
                self._release(user)

    def _release(self, task: Task) -> None:
        queue, ready_s = self._queues[task.hop.host], self._ready_s[task]
        depth, turn = self._graph.depths[task.microbatch, task.hop], self._graph.turns[task.microbatch]
        queue.add(task, depth, turn, ready_s)
        heapq.heappush(self._events, (max(ready_s, queue.free_s), task.hop.host))
