"""Blocks are fetched before a host must have them: when copies are asked for, and what becomes of them. How copies are
made and kept up to date is in `pipeline.unit_copies`, with units, the state of blocks.
"""

import functools
import threading
import time
from collections.abc import Collection, Sequence
from typing import Final

import jax

from resilient_jax.errors import ResilientJaxError
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.jax_runtime.world_values import publish_value, read_values, try_read_values
from resilient_jax.pipeline.block_state import UnitState
from resilient_jax.pipeline.copy_requests import (
    ANY_STEP,
    COPIES_STOPPED_MAIL,
    COPIES_WANTED_MAIL,
    COPY_MAIL,
    COPY_SUMS_MAIL,
    read_request,
)
from resilient_jax.pipeline.pipeline_step import PipelineWorker
from resilient_jax.pipeline.planned_copies import PlannedCopies
from resilient_jax.pipeline.stage_assignment import assign_stages
from resilient_jax.pipeline.unit_copies import CommittedStep, UnitCopies
from resilient_jax.pipeline_schedule.routes import find_holders
from resilient_jax.pipeline_schedule.teams import combine_speeds, make_teams
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.state_records import NextMembers
from resilient_jax.trainer.unit_placement import UnitPlacement
from resilient_jax.transport.mailbox import Mailbox
from resilient_jax.worker.worker_protocol import HeldPause
from resilient_jax.worker.world import World

DIRECTORY: Final = "resilient_jax/mail"
"""Of the mailboxes of the members, in the values of their world: by generation and host."""
FIND_TIMEOUT_S: Final = 5.0
"""Until the members have published their mailboxes: they do when a generation begins."""
FIND_INTERVAL_S: Final = 0.02
READY_DIRECTORY: Final = "resilient_jax/ready_mail"
"""Of the mailboxes of hosts that are ready to join, or spare until then, in the values of that world: by host."""
READY_TIMEOUT_S: Final = 0.5
"""For those mailboxes: the first member asks between two steps. It takes milliseconds, or the service is dead."""
NEWEST: Final = "resilient_jax/mail_generation"
"""The generation of each member, in the values of their world, by host."""
MAIL_KINDS: Final = (COPIES_WANTED_MAIL, COPY_MAIL, COPY_SUMS_MAIL, COPIES_STOPPED_MAIL)
"""Of what members send a host that is none."""
LOOK_INTERVAL_S: Final = 0.5
"""How often a worker that waits for copies asks whether the members have gone on to another generation."""
MAIL_INTERVAL_S: Final = 5.0
"""How often a host that is no member drops what members of earlier generations have sent it."""
DROP_TIMEOUT_S: Final = 1.0
"""For the copy that is being packed. A thread that has arrays of a world keeps its devices."""


class BlockPrefetch:
    """What a host fetches in one generation after the other.

    Attributes:
        bytes_taken: bytes of the units that the host had copies of when the present generation began.
    """

    def __init__(self) -> None:
        self.bytes_taken = 0
        self._copies: UnitCopies | None = None
        self._planned: PlannedCopies | None = None
        self._placement: UnitPlacement | None = None
        """Of the generation in which this host is a member; None: it is not, and nothing here keeps devices that go
        away."""
        self._is_member_or_gone = threading.Event()
        """Ends the thread that drops mail while this host is no member."""

    def enter(self, placement: UnitPlacement, worker: PipelineWorker, shapes: Sequence[UnitState]) -> None:
        """Have copies made for the next change of members in this generation, of which this host is one."""
        world, self._placement = placement.world, placement
        self._copies = _make_copies(placement, worker, shapes, world.generation)
        self._planned = PlannedCopies(world.host, world.generation, worker.service)
        worker.after_commit = functools.partial(self._pass_commit, worker)
        publish_value(f"{NEWEST}/{world.host}", str(world.generation))
        publish_value(f"{DIRECTORY}/{world.generation}/{world.host}", worker.service.address)

    def begin(self, placement: UnitPlacement, worker: PipelineWorker, shapes: Sequence[UnitState]) -> None:
        """Have what this host needs to join: say where to send copies, and wait for them if there is a place for it.

        Args:
            placement: placement as if this host had joined.
        """
        self.drop()
        # One that is about to join, too: the members may change before, and have it join then.
        publish_value(f"{READY_DIRECTORY}/{worker.host}", worker.service.address)
        is_over = self._is_member_or_gone = threading.Event()
        box = worker.service.box
        threading.Thread(target=_watch_mail, args=(box, is_over), name="rj-ready-mail", daemon=True).start()
        if placement.world.step_services.is_joining:
            self._follow(placement, worker, shapes)

    def _follow(self, placement: UnitPlacement, worker: PipelineWorker, shapes: Sequence[UnitState]) -> None:
        world = placement.world
        members = [host for host in world.hosts if host != world.host]
        addresses = _find_mailboxes(world, members)
        if not addresses:
            return
        copies = self._copies = _make_copies(placement, worker, shapes, world.generation)
        try:
            copies.request(addresses, placement.list_units_by_host())
        except ResilientJaxError:  # a member is lost, or has gone on
            self.drop()
            return
        copies.wait(members, world.raise_if_ended, _GenerationLook(world.generation).has_ended)

    def take(self, placement: UnitPlacement, worker: PipelineWorker, shapes: Sequence[UnitState]) -> None:
        """Have the copies that are of the step which the hosts of a new generation go on with as units of this host."""
        world = placement.world
        is_member = self._placement is not None
        sent = None if is_member else _find_sent_copies(placement, worker, shapes)
        if sent is not None:  # for this generation; what this host has asked for itself was for another
            self.drop()
        copies = sent or self._copies
        self._is_member_or_gone.set()
        self._copies, self._placement, self.bytes_taken = None, None, 0
        step, kept = world.step_services.parts_step, worker.state.all_states
        if copies is None:
            return
        copies.leave(world.hosts)
        # In the middle of a step units are as they were at its beginning.
        if step is None or worker.routed_in:
            copies.drop()
            return
        step = worker.step if kept else step
        if found := copies.finish(step, world.raise_if_ended):
            self.bytes_taken = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
            worker.replace_state(step, {**kept, **found}, are_copies=not kept)

    def wait_until_packed(self) -> None:
        """Return when nothing here reads the units of this host, which may be donated then."""
        if self._copies is not None:
            self._copies.wait_until_packed()

    def drop(self) -> None:
        """Drop all copies."""
        self._is_member_or_gone.set()
        copies, self._copies, self._placement = self._copies, None, None
        if copies is not None:
            copies.drop(DROP_TIMEOUT_S)

    def _pass_commit(self, worker: PipelineWorker, committed: CommittedStep) -> None:
        copies, planned, placement = self._copies, self._planned, self._placement
        if copies is None or planned is None or placement is None:
            return
        world = placement.world
        pause = world.step_services.held_pause if world.host == world.hosts[0] else None
        if pause is not None and pause.generation > planned.prepared:
            _prepare(planned, pause, placement, worker)
        copies.pass_commit(committed, world.hosts, placement.unit_holders)
        if copies.has_begun:
            world.step_services.hit_failpoint(FailPoint.DURING_COPIES)
        if (number := planned.pass_commit(committed.step)) is not None:
            world.step_services.answer_pause(GenerationNumber(number))


def _prepare(
    planned: PlannedCopies, pause: HeldPause, placement: UnitPlacement, worker: PipelineWorker
) -> None:
    """Have copies made for the members of a generation, as far as the mailboxes of hosts that come are known."""
    members, present = pause.next_members, placement.world.hosts
    come = set(members.hosts).difference(present)
    known = try_read_values(READY_DIRECTORY, READY_TIMEOUT_S) if come else {}
    addresses = {host: known[host] for host in come if host in known}
    wanted = _list_units_after(placement, worker, members, {*present, *addresses})
    # Since the order came: what holds up the next commit, such as an evaluation, counts.
    planned.prepare(pause.generation, wanted, addresses, pause.received_s + members.copy_timeout_s)


def _list_units_after(
    placement: UnitPlacement, worker: PipelineWorker, members: NextMembers, among: Collection[HostName]
) -> dict[HostName, set[int]]:
    """Return the units that each of some hosts is to have after a planned change; one that leaves has none."""
    costs, num_stages = placement.block_costs, placement.num_stages
    hosts = assign_stages(members.hosts, placement.stage_hosts, costs, num_stages)
    # Of hosts that come it is not known how many devices they have.
    speeds = combine_speeds(dict(members.layer_speeds), placement.device_speeds)
    teams = make_teams(hosts, costs, num_stages, speeds)
    holders = find_holders(teams)
    found: dict[HostName, set[int]] = {host: set() for host in among}
    for number, unit in enumerate(worker.state.units):
        for host in unit.list_holders(holders) & found.keys():
            found[host].add(number)
    return found


class _GenerationLook:
    """Whether the members are in a later generation than this one, as they publish it; asked now and then."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._looked_s = time.monotonic()

    def has_ended(self) -> bool:
        """Return whether some member is in a later generation."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_INTERVAL_S:
            return False
        self._looked_s = now_s
        return _find_newest() > self._generation


def _find_newest() -> int:
    """Return the newest generation of any member; 0: none is published."""
    return max(map(int, read_values(NEWEST).values()), default=0)


def _watch_mail(box: Mailbox, is_over: threading.Event) -> None:
    """Drop the mail of generations that have ended, until this host is a member, or does without mail."""
    while not is_over.wait(MAIL_INTERVAL_S):
        drop_old_mail(box, _find_newest())


def drop_old_mail(box: Mailbox, newest: int) -> None:
    """Drop what members have sent a host in generations before the newest: the change that it was for has not come."""
    for kind in MAIL_KINDS:
        while box.try_take_kind(kind, lambda key: key.generation < newest) is not None:
            continue


def _find_sent_copies(
    placement: UnitPlacement, worker: PipelineWorker, shapes: Sequence[UnitState]
) -> UnitCopies | None:
    """Return the copies that members have sent this host, which spared until now; None: they have sent none."""
    about = ANY_STEP + placement.world.generation
    mail = worker.service.box.try_take_kind(COPIES_WANTED_MAIL, lambda key: key.step == about)
    if mail is None:
        return None
    copies = _make_copies(placement, worker, shapes, mail.key.generation)
    copies.expect(read_request(mail.data))
    return copies


def _make_copies(
    placement: UnitPlacement, worker: PipelineWorker, shapes: Sequence[UnitState], generation: int
) -> UnitCopies:
    return UnitCopies(
        worker.host,
        generation,
        worker.service,
        worker.state,
        shapes,
        placement.sharding,
        {name: shape for name, (_, shape) in worker.cut.changed_variables.items()},
    )


def _find_mailboxes(world: World, members: Sequence[HostName]) -> dict[HostName, str] | None:
    """Return the addresses of the mailboxes of all members; None: some are not published."""
    end_s = time.monotonic() + FIND_TIMEOUT_S
    while time.monotonic() < end_s:
        world.raise_if_ended()
        found = {
            HostName(name): text for name, text in read_values(f"{DIRECTORY}/{world.generation}").items()
        }
        if found.keys() >= set(members):
            return {host: found[host] for host in members}
        time.sleep(FIND_INTERVAL_S)
    return None
