"""The unfinished tasks of a step as a graph: what each waits for, and what waits for it."""

import collections
from collections.abc import Collection

from resilient_jax.pipeline_schedule.errors import RouteError
from resilient_jax.pipeline_schedule.routes import Hop, Routes
from resilient_jax.pipeline_schedule.tasks import (
    Boundary,
    PipelineSchedule,
    Task,
    TaskKind,
    find_input,
    list_needs,
    list_tasks,
)


class TaskGraph:
    """The graph of a step that is done in part.

    Attributes:
        finished: finished tasks, sorted.
        summed: the hops, with their microbatch, that have their weight gradients and run the tasks before again, for a
            value that its sender no longer has.
        needs: for each unfinished task the tasks that it needs, finished ones, too; without those whose value has
            arrived.
        users: for each task the unfinished tasks that need it.
        turns: for each microbatch how many of lower index have the same hops: pipelines that share a host take turns.
        depths: for each hop of a microbatch the number of hops from it to the loss, itself included, and the number of
            hops of its route.
    """

    def __init__(
        self,
        routes: Routes,
        schedule: PipelineSchedule,
        done: Collection[Task],
        arrived: Collection[Boundary],
    ) -> None:
        self.finished = sorted(set(done))
        self.depths: dict[tuple[int, Hop], tuple[int, int]] = {
            (route.microbatch, hop): (len(route.hops) - place, len(route.hops))
            for route in routes
            for place, hop in enumerate(route.hops)
        }
        counts: collections.Counter[tuple[Hop, ...]] = collections.Counter()
        self.turns: dict[int, int] = {}
        for route in routes:
            self.turns[route.microbatch] = counts[route.hops]
            counts[route.hops] += 1
        tasks = dict.fromkeys(list_tasks(routes, schedule))
        validate_done(frozenset(done), frozenset(tasks), schedule)
        for task in self.finished:
            del tasks[task]
        self.summed = frozenset(
            (task.microbatch, task.hop)
            for task in tasks
            if task.kind is TaskKind.INPUT_GRADIENT
            and Task(TaskKind.WEIGHT_GRADIENT, task.microbatch, task.hop) not in tasks
        )
        routes_by_microbatch = {route.microbatch: route for route in routes}
        self.needs: dict[Task, tuple[Task, ...]] = {}
        self.users: dict[Task, list[Task]] = {}
        for task in tasks:
            route = routes_by_microbatch[task.microbatch]
            has_input = bool(arrived) and find_input(task, route.num_blocks) in arrived
            self.needs[task] = tuple(
                need for need in list_needs(task, route) if need.hop == task.hop or not has_input
            )
            for need in self.needs[task]:
                self.users.setdefault(need, []).append(task)


def validate_done(done: frozenset[Task], tasks: frozenset[Task], schedule: PipelineSchedule) -> None:
    """Check that finished tasks are tasks of the step, and that no backward pass is without its forward pass.

    Raises:
        RouteError: a task is not so; names the first.
    """
    for task in sorted(done):
        if task not in tasks:
            raise RouteError(
                f"done: found {task}, expected tasks of the routes and of the schedule {schedule.value}; the tasks of "
                "a dead host are not done"
            )
        is_backward = task.kind in (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
        if is_backward and Task(TaskKind.FORWARD, task.microbatch, task.hop) not in done:
            raise RouteError(f"done: found {task} without forward of the same hop, expected both")
