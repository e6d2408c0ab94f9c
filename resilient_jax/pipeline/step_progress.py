"""How a step goes on in a new generation: what each host has done, and what is sent or computed again.

All living hosts tell each other their finished tasks, and compute the same routes and orders from that. Values that no
task has used yet are sent again, from the logs: those that were on their way belong to the old generation. A value that
its sender no longer has is computed again, and so is what that needs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import list_complete_blocks
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.state_units import StateUnit
from resilient_jax.pipeline_schedule.rerouting import BACKWARD_KINDS, Resend, find_resends, reroute
from resilient_jax.pipeline_schedule.routes import Routes
from resilient_jax.pipeline_schedule.tasks import (
    Boundary,
    PipelineSchedule,
    Task,
    TaskKind,
)

PROGRESS_STEP: Final = 2**62
"""In the keys of progress, in place of a step: hosts may differ in theirs, and no finished step is as high."""


class TaskProgress(msgspec.Struct, frozen=True):
    """What a host says.

    Attributes:
        step: number of the next step that the host commits; 0 also for a host with no state at all.
        table: commit table of the step before, with which another host that has its sums can commit that step, too;
            None if the host does not know it, as in the first step.
        units_here: units that the host has; also those that it has only until the step is committed.
        units_after: units that the host updates, and has afterwards.
        blocks: blocks of which the host has all weights.
        routed_in: generation of the routes; 0: the host has begun nothing of the step.
        routes: routes of the step; empty if the host has begun nothing.
        done: finished tasks of the step.
        forgotten: values of the step that the host has sent, and no longer has.
        has_copies: whether the host has not trained yet, and what it has was copied while others did.
    """

    step: int
    table: CommitTable | None
    units_here: tuple[int, ...]
    units_after: tuple[int, ...]
    blocks: tuple[int, ...]
    routed_in: int = 0
    routes: Routes = ()
    done: tuple[Task, ...] = ()
    forgotten: tuple[Boundary, ...] = ()
    has_copies: bool = False


class Continuation(msgspec.Struct, frozen=True):
    """How a step goes on.

    Attributes:
        routes: without dead hosts.
        done: the finished tasks, for orders: of a hop that is redone in part none, as a task is done after those that
            it needs. Hosts skip what they have.
        redone: tasks that were finished, and are run again for the values that they send.
        resends: values that are sent again.
    """

    routes: Routes
    done: frozenset[Task]
    redone: frozenset[Task]
    resends: tuple[Resend, ...]


def catch_up(progress: TaskProgress, step: int, units: Sequence[StateUnit]) -> TaskProgress:
    """Return what a host that was behind says when it has committed what the others have: nothing of `step` is done."""
    after = progress.units_after
    return TaskProgress(
        step=step, table=None, units_here=after, units_after=after, blocks=list_complete_blocks(units, after)
    )


def drop_late_copies(progress: Mapping[HostName, TaskProgress], step: int) -> dict[HostName, TaskProgress]:
    """Return what all hosts say, with nothing of those that have only copies of an earlier step than `step`.

    Such a host has no sums with which it could commit what the others have.
    """
    nothing = TaskProgress(step=step, table=None, units_here=(), units_after=(), blocks=())
    return {host: nothing if one.has_copies and one.step < step else one for host, one in progress.items()}


def find_newest_routing(progress: Mapping[HostName, TaskProgress]) -> int:
    """Return the generation of the newest routes of the step; 0: no host has begun it.

    A host with older ones was away meanwhile: what it has done was done again.
    """
    return max(host_progress.routed_in for host_progress in progress.values())


def plan_continuation(
    progress: Mapping[HostName, TaskProgress], num_blocks: int, schedule: PipelineSchedule
) -> Continuation:
    """Return how the step goes on; the same on every host.

    Args:
        progress: what every living host says of one step, which at least one of them has begun.
        num_blocks: blocks of the whole model.

    Raises:
        HoldersLost: a block has no living holder.
    """
    # Only what was done by the newest routes counts. A host with older ones was away when the others went on, and has
    # nothing of the step: its hops are redone, but it is alive, and may be given hops again (`emptied`).
    newest = find_newest_routing(progress)
    current = {name: host for name, host in progress.items() if host.routed_in == newest}
    # All current hosts have the same routes: each has computed them from the same progress.
    routes = next(host.routes for host in current.values())
    named = {hop.host for route in routes for hop in route.hops}
    found = reroute(
        routes,
        {task for host in current.values() for task in host.done},
        [
            frozenset(name for name, host in progress.items() if block in host.blocks)
            for block in range(num_blocks)
        ],
        named.difference(progress),
        schedule=schedule,
        emptied=set(progress).difference(current),
    )
    # A value that is to be sent again, but has left its sender's log, is computed again. That needs values in turn, of
    # which `find_resends` then knows, and which may have left a log, too: until every value is in some log.
    forgotten = {boundary for host in current.values() for boundary in host.forgotten}
    done, redone = set(found.done), set[Task]()
    while again := _list_redone(resends := find_resends(found.routes, done), forgotten):
        done -= again  # what these need is missing now, too
        redone |= again
    # A host still skips what it has done of such a hop (`StageRunner.done`); the order alone counts all of it.
    in_part = {(task.microbatch, task.hop) for task in redone}
    return Continuation(
        routes=found.routes,
        done=frozenset(task for task in done if (task.microbatch, task.hop) not in in_part),
        redone=frozenset(redone),
        resends=tuple(sorted(resends.values())),
    )


def _list_redone(resends: Mapping[Task, Resend], forgotten: Collection[Boundary]) -> set[Task]:
    """Return finished tasks that are run again because a value of theirs is missing and forgotten."""
    again = {task for task, resend in resends.items() if resend.boundary in forgotten}
    # A backward pass uses up the residuals of the forward pass.
    again |= {
        Task(TaskKind.FORWARD, task.microbatch, task.hop) for task in again if task.kind in BACKWARD_KINDS
    }
    return again
