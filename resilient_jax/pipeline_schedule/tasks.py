"""The tasks of a step, what each needs, and the values that cross from hop to hop.

    F  forward pass of a hop                           needs F of the hop before
    B  gradient of the hop's input                     needs F of the hop, B of the hop after
    W  gradients of the hop's weights                  needs B of the hop
    B and W as one program, the whole backward pass    needs what B needs

A task names its hop by value, not by its place in the route: so a finished task stays valid when other hops of its
route are given to other hosts.
"""

import enum
from collections.abc import Iterator
from typing import Final, assert_never

import msgspec

from resilient_jax.pipeline_schedule.errors import RouteError
from resilient_jax.pipeline_schedule.routes import Hop, Route, Routes


class TaskKind(enum.StrEnum):
    """What a host computes for a hop."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole backward pass: gradients of the input and of the weights in one program."""
    INPUT_GRADIENT = "input_gradient"
    """B: what the hop before waits for."""
    WEIGHT_GRADIENT = "weight_gradient"
    """W: only the sum of the step waits for it."""


class PipelineSchedule(enum.StrEnum):
    """Which tasks a hop has, and when weight gradients are computed."""

    WHOLE_BACKWARD = "whole_backward"
    """1F1B; the hop before waits until the whole backward pass is done."""
    GRADIENT_FIRST = "gradient_first"
    """1F1B; W directly after its B, whose result is sent before W begins. As much memory as the former."""
    ZERO_BUBBLE = "zero_bubble"
    """W in gaps, as ZB-H1 of Qi et al. 2023, https://arxiv.org/abs/2401.10241: what W needs is kept until then."""


DEFAULT_SCHEDULE: Final = PipelineSchedule.ZERO_BUBBLE
"""What hosts run where nothing else is said, and what plans are priced by."""
KINDS: Final = {
    PipelineSchedule.WHOLE_BACKWARD: (TaskKind.FORWARD, TaskKind.BACKWARD),
    PipelineSchedule.GRADIENT_FIRST: (TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT),
    PipelineSchedule.ZERO_BUBBLE: (TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT),
}
"""The kinds of tasks of a hop, in the order in which they run."""


class Task(msgspec.Struct, frozen=True, order=True):
    """One computation of a host.

    Attributes:
        microbatch: index of the microbatch in the step.
    """

    kind: TaskKind
    microbatch: int
    hop: Hop


class BoundaryKind(enum.StrEnum):
    """What crosses from hop to hop."""

    ACTIVATION = "activation"
    """To the hop that begins with the block."""
    GRADIENT = "gradient"
    """Of the activation at the same boundary, to the hop that ends before the block."""


class Boundary(msgspec.Struct, frozen=True, order=True):
    """A value of a microbatch at the boundary before a block; a key in mailboxes and logs.

    Attributes:
        microbatch: index of the microbatch in the step.
        block: the first block after the boundary; never 0.
    """

    kind: BoundaryKind
    microbatch: int
    block: int


def list_tasks(routes: Routes, schedule: PipelineSchedule) -> Iterator[Task]:
    """Yield every task of a step."""
    for route in routes:
        for hop in route.hops:
            for kind in KINDS[schedule]:
                yield Task(kind, route.microbatch, hop)


def list_needs(task: Task, route: Route) -> tuple[Task, ...]:
    """Return the tasks that must be done before a task of the route begins: its own host's first."""
    place = route.hops.index(task.hop)
    if task.kind is TaskKind.FORWARD:
        return (_replace(task, hop=route.hops[place - 1]),) if place else ()
    if task.kind is TaskKind.WEIGHT_GRADIENT:
        return (_replace(task, kind=TaskKind.INPUT_GRADIENT),)
    own = _replace(task, kind=TaskKind.FORWARD)
    return (own, _replace(task, hop=route.hops[place + 1])) if place + 1 < len(route.hops) else (own,)


def find_input(task: Task, num_blocks: int) -> Boundary | None:
    """Return the value that the task gets from another hop; None if it needs none.

    The first hop has its microbatch from the data, the last begins the backward pass with the gradient of the loss, 1.

    Args:
        num_blocks: blocks of the whole model.
    """
    return _find_crossing(task, task.hop.first_block, task.hop.end_block, num_blocks)


def find_output(task: Task, num_blocks: int) -> Boundary | None:
    """Return the value that the task sends to another hop; None if it sends none.

    Args:
        num_blocks: blocks of the whole model.
    """
    return _find_crossing(task, task.hop.end_block, task.hop.first_block, num_blocks)


def find_ends(boundary: Boundary, route: Route) -> tuple[Hop, Hop]:
    """Return the hops that send and that get a value.

    Raises:
        RouteError: the route has no cut at that boundary.
    """
    after = next((i for i, hop in enumerate(route.hops) if i and hop.first_block == boundary.block), None)
    if after is None:
        raise RouteError(
            f"route of microbatch {route.microbatch}: found no hop that begins with block {boundary.block}, expected "
            f"one, for {boundary}"
        )
    left, right = route.hops[after - 1], route.hops[after]
    return (left, right) if boundary.kind is BoundaryKind.ACTIVATION else (right, left)


def _find_crossing(task: Task, forward: int, backward: int, num_blocks: int) -> Boundary | None:
    """Return the value that crosses the cut before block `forward` in a forward task, `backward` in a backward one."""
    match task.kind:
        case TaskKind.FORWARD:
            kind, block = BoundaryKind.ACTIVATION, forward
        case TaskKind.BACKWARD | TaskKind.INPUT_GRADIENT:
            kind, block = BoundaryKind.GRADIENT, backward
        case TaskKind.WEIGHT_GRADIENT:
            return None
        case _:
            assert_never(task.kind)
    return Boundary(kind, task.microbatch, block) if 0 < block < num_blocks else None


def _replace(task: Task, *, kind: TaskKind | None = None, hop: Hop | None = None) -> Task:
    return Task(task.kind if kind is None else kind, task.microbatch, task.hop if hop is None else hop)
