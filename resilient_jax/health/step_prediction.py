"""What a step takes: the longest path of its own schedule.

A task begins when the task before it on its host is done, and all that it needs: end(t) = max(end(needs)) + seconds(t).
The step takes as long as the path to the task that ends last.
"""

import graphlib
from collections.abc import Callable, Mapping, Sequence

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import Routes
from resilient_jax.pipeline_schedule.tasks import Task, list_needs


class StepPath:
    """The graph of a step's tasks: what each host does in order, and what each task needs.

    Args:
        orders: tasks of each host in order, as `order_tasks` returns them.
    """

    def __init__(self, orders: Mapping[HostName, Sequence[Task]], routes: Routes) -> None:
        by_microbatch = {route.microbatch: route for route in routes}
        needs: dict[Task, list[Task]] = {}
        for tasks in orders.values():
            for place, task in enumerate(tasks):
                before = [tasks[place - 1]] if place else []
                needs[task] = [*before, *list_needs(task, by_microbatch[task.microbatch])]
        self.tasks = list(graphlib.TopologicalSorter(needs).static_order())
        """In an order in which each comes after all that it needs."""
        index_of = {task: index for index, task in enumerate(self.tasks)}
        self._needs = [tuple(index_of[need] for need in needs[task]) for task in self.tasks]

    def predict_s(self, seconds: Callable[[Task], float]) -> float:
        """Return the length of the longest path, from the seconds of each task.

        >>> from resilient_jax.pipeline_schedule.routes import make_route
        >>> from resilient_jax.pipeline_schedule.task_orders import order_tasks
        >>> from resilient_jax.pipeline_schedule.tasks import PipelineSchedule
        >>> routes = tuple(make_route(i, [("a", 1), ("b", 1)]) for i in range(3))
        >>> orders = order_tasks(routes, lambda *_: 1.0, schedule=PipelineSchedule.WHOLE_BACKWARD).orders
        >>> StepPath(orders, routes).predict_s(lambda task: 1.0)
        8.0
        """
        ends: list[float] = []
        for task, needs in zip(self.tasks, self._needs, strict=True):
            ends.append(max((ends[need] for need in needs), default=0.0) + seconds(task))
        return max(ends, default=0.0)
