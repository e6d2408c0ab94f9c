"""New routes for a step in which hosts have died: their hops go to other holders of the blocks.

1. A hop on a living host stays, with all that is finished of it: its residuals and weight gradients are there.
2. A hop on a dead host is redone, finished or not: weight gradients that no sum has yet were lost with the host.
   Consecutive dead hops of a route are one range of blocks. It goes to living holders in as few pieces as possible, and
   of those that allow this each piece to the host that would be done with it first.
3. What a finished task has sent and no finished task has used is sent again, from the sender's log: to the host that
   takes over, or because mail on its way was of the old generation. What arrives a second time has the same bits.

Only what the dead hosts had computed is computed again. Each survivor computes the same from the same arguments.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import HoldersLost
from resilient_jax.pipeline_schedule.routes import Hop, Route, Routes, validate_routes
from resilient_jax.pipeline_schedule.task_orders import BlockSeconds, take_equal_time
from resilient_jax.pipeline_schedule.tasks import (
    KINDS,
    Boundary,
    PipelineSchedule,
    Task,
    TaskKind,
    find_ends,
    find_output,
)

Holders = Sequence[Collection[HostName]]
"""For each block the hosts that have its state, dead ones, too."""


BACKWARD_KINDS: Final = (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
"""The tasks that send a gradient."""


class Resend(msgspec.Struct, frozen=True, order=True):
    """A value that its sender has computed, and that its receiver still needs.

    Attributes:
        sender: the host that has the value in its log.
        receiver: the host that needs the value; may be the sender.
    """

    boundary: Boundary
    sender: HostName
    receiver: HostName


class Rerouting(msgspec.Struct, frozen=True):
    """How a step goes on without its dead hosts.

    Attributes:
        done: finished tasks that count: tasks of living hosts.
    """

    routes: Routes
    done: frozenset[Task]


def reroute(
    routes: Routes,
    done: Collection[Task],
    holders: Holders,
    dead: Collection[HostName],
    *,
    schedule: PipelineSchedule,
    seconds: BlockSeconds = take_equal_time,
    emptied: Collection[HostName] = (),
) -> Rerouting:
    """Return the routes with every hop on a living host.

    Args:
        routes: routes of the step until now.
        done: finished tasks; tasks of dead hosts do not count.
        dead: hosts that compute nothing any more.
        seconds: duration of a block's task on a host.
        emptied: living hosts that have nothing of the step any more, such as one that was started again: hops of these
            hosts are redone as hops of dead hosts, and may go to these hosts.

    Raises:
        HoldersLost: a block has no living holder.
    """
    living = find_living_holders(holders, frozenset(dead))
    gone = frozenset(dead).union(emptied)
    kept = frozenset(task for task in done if task.hop.host not in gone)
    loads = _HostLoads(schedule, seconds)
    for host in sorted(set().union(*living)):
        loads.add_host(host)
    for route in routes:
        for hop in route.hops:
            if hop.host not in gone:
                loads.add(hop, route.microbatch, kept)
    found = validate_routes(
        Route(route.microbatch, tuple(_replace_dead(route, gone, living, loads))) for route in routes
    )
    return Rerouting(routes=found, done=kept)


def find_living_holders(
    holders: Holders, dead: Collection[HostName] = frozenset()
) -> tuple[frozenset[HostName], ...]:
    """Return the living hosts that have the state of each block.

    Raises:
        HoldersLost: a block has no living holder; names all such blocks.
    """
    living = tuple(frozenset(hosts).difference(dead) for hosts in holders)
    lost = tuple(block for block, hosts in enumerate(living) if not hosts)
    if lost:
        raise HoldersLost(
            f"blocks {', '.join(map(str, lost))}: found no living holder, expected one of each of {len(living)} "
            f"blocks. Dead: {', '.join(sorted(dead)) or 'none'}. Restore these blocks from parity or a checkpoint on a "
            "living host, and name it as a holder.",
            blocks=lost,
        )
    return living


def find_resends(routes: Routes, done: Collection[Task]) -> dict[Task, Resend]:
    """Return what finished tasks have sent and no finished task has used, by the task that has sent it.

    Args:
        done: finished tasks of hops of these routes.
    """
    found: dict[Task, Resend] = {}
    finished = frozenset(done)
    routes_by_microbatch = {route.microbatch: route for route in routes}
    for task in finished:
        route = routes_by_microbatch[task.microbatch]
        boundary = find_output(task, route.num_blocks)
        if boundary is None:
            continue
        _, receiver = find_ends(boundary, route)
        kinds = BACKWARD_KINDS if task.kind in BACKWARD_KINDS else (TaskKind.FORWARD,)
        if not any(Task(kind, task.microbatch, receiver) in finished for kind in kinds):
            found[task] = Resend(boundary, task.hop.host, receiver.host)
    return found


class _HostLoads:
    """The time that each host still needs."""

    def __init__(self, schedule: PipelineSchedule, seconds: BlockSeconds) -> None:
        self._kinds = KINDS[schedule]
        self._seconds = seconds
        self._load_s: dict[HostName, float] = {}

    def add_host(self, host: HostName) -> None:
        self._load_s.setdefault(host, 0.0)

    def add(self, hop: Hop, microbatch: int, done: frozenset[Task] = frozenset()) -> None:
        left = [kind for kind in self._kinds if Task(kind, microbatch, hop) not in done]
        self._load_s[hop.host] = self._load_s.get(hop.host, 0.0) + self._count_s(hop, left)

    def find_end_s(self, hop: Hop) -> float:
        """Return when the host would be done, with the hop besides what it has."""
        return self._load_s[hop.host] + self._count_s(hop, self._kinds)

    def _count_s(self, hop: Hop, kinds: Sequence[TaskKind]) -> float:
        return sum(self._seconds(hop.host, kind, block) for kind in kinds for block in hop.blocks)


def _replace_dead(
    route: Route, dead: frozenset[HostName], living: Sequence[frozenset[HostName]], loads: _HostLoads
) -> Iterator[Hop]:
    for is_dead, group in itertools.groupby(route.hops, key=lambda hop: hop.host in dead):
        hops = list(group)
        if not is_dead:
            yield from hops
            continue
        for hop in _cut_range(hops[0].first_block, hops[-1].end_block, living, loads):
            loads.add(hop, route.microbatch)
            yield hop


def _cut_range(
    first_block: int, end_block: int, living: Sequence[frozenset[HostName]], loads: _HostLoads
) -> Iterator[Hop]:
    """Yield the range in as few hops as possible."""
    # pieces(b) = 1 + min over the holders of b of pieces(end of the holder's run of blocks from b); pieces(end) = 0. A
    # longer run never needs more pieces after it, so a piece is always a holder's whole run.
    choices: dict[int, list[Hop]] = {}
    pieces = {end_block: 0}
    for block in reversed(range(first_block, end_block)):
        runs = [Hop(host, block, _find_run_end(host, block, end_block, living)) for host in living[block]]
        pieces[block] = 1 + min(pieces[hop.end_block] for hop in runs)
        choices[block] = [hop for hop in runs if pieces[hop.end_block] == pieces[block] - 1]
    block = first_block
    while block < end_block:
        hop = min(choices[block], key=lambda hop: (loads.find_end_s(hop), hop))
        yield hop
        block = hop.end_block


def _find_run_end(
    host: HostName, first_block: int, end_block: int, living: Sequence[frozenset[HostName]]
) -> int:
    run = itertools.takewhile(lambda block: host in living[block], range(first_block, end_block))
    return first_block + sum(1 for _ in run)
