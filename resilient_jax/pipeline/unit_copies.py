"""Copies of units for hosts that are about to hold them: made and kept up to date while training goes on.

1. A worker that joins tells all members, by mail, what each host is to hold when it has joined. If the members change
   otherwise, between two steps, the first of them does (`planned_copies`).
2. After its next commit, one holder of each unit that somebody lacks begins to send it: a thread packs the state. After
   each later commit it sends the sums of the unit's gradients, with norm, loss and divisor of the step.
3. Whoever lacks a unit updates its copy with these sums, by the program that holders use: it has the same bits.
4. When the members change, a copy that is of the step which all go on with is a unit like any other, and nothing moves.

A copy is no part of the job's state before that. If a sender or receiver of copies dies, or something is late, copies
are dropped, and the units move between two steps as they do without.
"""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any, Final

import jax
import msgspec
import numpy as np

from resilient_jax.errors import ResilientJaxError
from resilient_jax.host_exchange.array_packing import pack_arrays, unpack_arrays
from resilient_jax.host_exchange.step_mail import MailCarrier
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import BlockState, UnitState, describe_sums, place_sums, place_unit
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.pipeline.copy_deliveries import CopyDelivery
from resilient_jax.pipeline.copy_requests import (
    ANY_STEP,
    COPIES_HERE_MAIL,
    COPIES_STOPPED_MAIL,
    COPIES_WANTED_MAIL,
    COPY_MAIL,
    COPY_SUMS_MAIL,
    MAX_GENERATIONS,
    REQUEST_BITS,
    CopyRequest,
    read_request,
)
from resilient_jax.pipeline.unit_exchange import plan_moves
from resilient_jax.sharding.stage_sharding import StageSharding
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind

PATIENCE_S: Final = 60.0
"""A worker that joins does without copies if nothing has come for so long: a generation has ended, or a host hangs."""
CATCH_UP_TIMEOUT_S: Final = 5.0
"""The longest wait for the sums of the last step. They are a third of what else would be sent, or less."""
TELL_TIMEOUT_S: Final = 0.1
"""For the message to a worker that it is to wait no more. It waits for `PATIENCE_S` without."""
CHECK_INTERVAL_S: Final = 0.05
NO_COPIES: Final = b""
"""In place of its name: a member tells the first one that it makes no copies any more."""
PACKING_TIMEOUT_S: Final = 60.0
"""The longest wait of an update for states that are being packed. What is not packed then cannot be sent."""
MAX_SUMS_RATIO: Final = 2
FREE_SUMS_BYTES: Final = 2**28
"""A host that joins by a planned change reads its mail when it does, and keeps all sums in memory until then. When they
are so many times the bytes of its copies, and more than what always fits, the change is let come as it is. If it
does not, and they are twice as much, no more are sent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """What a holder has updated its units with.

    Attributes:
        step: number of committed steps, this one included.
        table: what the updates of all hosts used.
        sums: by unit number and name, the gradient sums of each unit that this host holds.
    """

    step: int
    table: CommitTable
    sums: Mapping[int, Mapping[str, Any]]


@dataclasses.dataclass(slots=True)
class _Copy:
    """A unit after some steps."""

    step: int
    state: UnitState


class UnitCopies:
    """The copies that one host receives in one generation, and those that it sends.

    Attributes:
        generation: number of the generation in which the members train.
    """

    def __init__(
        self,
        own: HostName,
        generation: int,
        service: MailCarrier,
        state: BlockState,
        shapes: Sequence[UnitState],
        sharding: StageSharding,
        changed: Mapping[str, jax.ShapeDtypeStruct],
    ) -> None:
        """Have no copy.

        Args:
            generation: number of the members' generation.
            service: carrier of this host's mail.
            state: units that this host holds, whose update programs its copies use, too.
            shapes: shapes of the state of each unit, by number.
            sharding: layout over the devices of this host.
            changed: variable name to the shape that one microbatch gives, for each variable that the loss changes.
        """
        self.generation = generation
        self._own = own
        self._service = service
        self._state = state
        self._shapes = shapes
        self._sharding = sharding
        self._changed = changed
        self._wanted: frozenset[int] = frozenset()
        """The units that this host is to have copies of."""
        self._copies: dict[int, _Copy] = {}
        self._request: CopyRequest | None = None
        self._about = ANY_STEP
        """In place of a step in the keys of all mail about this request."""
        self._delivery: CopyDelivery | None = None
        self._packer: ThreadPoolExecutor | None = None
        self._packing: tuple[Future[None], ...] = ()
        """The states that are being packed."""
        self._has_told = False
        """Whether the worker that joins knows that this host has all copies."""

    # The worker that joins.

    def request(self, addresses: Mapping[HostName, str], wanted: Mapping[HostName, Collection[int]]) -> None:
        """Ask the members for copies, of which this host wants all that it is to hold.

        Args:
            addresses: mailbox address of each member.
            wanted: the units that each host is to hold when this one has joined.
        """
        # The mail of the generation that the members train in: this host will join the one after it.
        self._service.enter(self.generation, addresses)
        self._wanted = frozenset(wanted[self._own])
        asked = {host: tuple(sorted(units)) for host, units in sorted(wanted.items())}
        number = MAX_GENERATIONS + secrets.randbits(REQUEST_BITS)
        self._request = CopyRequest(
            host=self._own, addresses={self._own: self._service.address}, wanted=asked, number=number
        )
        self._about = self._request.about
        for host in sorted(addresses):
            self._tell(host, COPIES_WANTED_MAIL, msgspec.msgpack.encode(self._request))

    def wait(
        self,
        members: Collection[HostName],
        check: Callable[[], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until this host and all members have the copies that they want; return whether they have.

        Args:
            members: all hosts of the generation.
            check: raises what ends the wait, such as the end of the generation.
            is_over: says whether the members have gone on to another generation, in which nobody sends copies.
        """
        box, missing, since_s = self._service.box, set(members), time.monotonic()
        while True:
            check()
            while (
                mail := box.try_take_kind(COPIES_HERE_MAIL, lambda key: key.step == self._about)
            ) is not None:
                missing.discard(HostName(bytes(mail.data).decode()))
                since_s = time.monotonic()
            try:
                if self._take():
                    since_s = time.monotonic()
                # The change gives members other units, too: nothing moves then only if all have their copies.
                if self._wanted <= self._copies.keys() and not missing:
                    for host in sorted(members):
                        self._tell(host, COPIES_HERE_MAIL, self._own.encode())
                    return True
            except ResilientJaxError:  # a member is lost, or sends what does not fit
                since_s = float("-inf")
            is_late = time.monotonic() - since_s > PATIENCE_S
            if is_late or self._was_told(COPIES_STOPPED_MAIL) or is_over():
                self.drop()
                return False
            box.wait_for_more(CHECK_INTERVAL_S)

    def expect(self, request: CopyRequest) -> None:
        """Have what members have sent for a request of theirs: this host is ready to join, and has trained nothing."""
        self._request, self._about = request, request.about
        self._wanted = frozenset(request.wanted[self._own])

    # A member.

    def pass_commit(
        self, committed: CommittedStep, hosts: Collection[HostName], holders: Sequence[Collection[HostName]]
    ) -> None:
        """Send what others are to have copies of in this step; update the copies that are here.

        Args:
            committed: the step that was just committed here.
            hosts: the members.
            holders: the hosts that have each unit.
        """
        own = {number for number, having in enumerate(holders) if self._own in having}
        if not own <= committed.sums.keys():
            return  # of the generation before: the hosts agree on a step, and units have not moved yet
        try:
            while (mail := self._service.box.try_take_kind(COPIES_WANTED_MAIL)) is not None:
                self._accept(read_request(mail.data), hosts, holders)
            request, delivery = self._request, self._delivery
            if request is None or delivery is None:
                return
            # Asked before the sums of this step are queued: at each commit these take a while, too.
            is_sent = _has_sent(self._service, request, delivery, self._packing)
            self._deliver(request, delivery, committed)
            if self._delivery is None:  # it was the last
                return
            self._take()
            if self._wanted <= self._copies.keys() and is_sent and not self._has_told:
                self._has_told = True
                self._tell(request.host, COPIES_HERE_MAIL, self._own.encode())
        except ResilientJaxError:  # a receiver is lost: the units move when the members change, if they do
            self.stop()

    def wait_until_packed(self) -> None:
        """Return when no thread reads the state of this host's units, which may be donated then."""
        wait_for_futures(self._packing, PACKING_TIMEOUT_S)

    @property
    def has_begun(self) -> bool:
        """Whether this host has sent copies, or has some."""
        return bool(self._copies) or (self._delivery is not None and self._delivery.since_s is not None)

    def _accept(
        self, request: CopyRequest, hosts: Collection[HostName], holders: Sequence[Collection[HostName]]
    ) -> None:
        """Begin with the copies for a request; those for an earlier one are dropped."""
        if set(request.wanted) != {*hosts, *request.addresses} or not request.addresses.keys().isdisjoint(
            hosts
        ):
            return  # it was meant for other members
        if self._request is not None and self._request.is_planned and not request.is_planned:
            return  # the members change before a worker that asks now could join
        # The hosts of the earlier request are told: they would wait for sums that come no more.
        self.stop()
        for host, address in sorted(request.addresses.items()):
            self._service.add_peer(host, address, may_be_lost=request.is_planned)
        # Every member plans the same moves from the same request and holders, so nobody needs to be told its own.
        moves = plan_moves(holders, request.wanted)
        mine = tuple(move for move in moves if move.sender == self._own)
        self._wanted = frozenset(move.unit for move in moves if move.receiver == self._own)
        self._request, self._about, self._has_told = request, request.about, False
        # Members read their mail at each commit; only hosts that are no members yet keep sums in memory.
        leaves = jax.tree.leaves(
            [self._shapes[move.unit] for move in mine if move.receiver in request.addresses]
        )
        max_bytes = max(
            FREE_SUMS_BYTES, MAX_SUMS_RATIO * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        )
        self._delivery = CopyDelivery(moves=mine, max_sums_bytes=max_bytes)

    def _deliver(self, request: CopyRequest, delivery: CopyDelivery, committed: CommittedStep) -> None:
        now_s = time.monotonic()
        if delivery.since_s is None:
            # The states already have this step's sums in them: those of the next one are the first to be sent.
            delivery.since_s = now_s
            self._begin_packing(delivery, committed.step)
            return
        # Of a planned change this mail is for `PlannedCopies`, which counts the hosts that have their copies.
        if not request.is_planned and self._was_told(COPIES_HERE_MAIL):
            delivery.idle_since_s = now_s
        elif delivery.idle_since_s is not None:
            delivery.idle_steps += 1
        # A state that could not be packed was not sent, so its copy can never be complete.
        has_failed = any(future.done() and future.exception() is not None for future in self._packing)
        if has_failed or delivery.is_over(now_s):
            self.stop()
            return
        for unit in delivery.units:
            sent = self._send_sums(delivery, unit, committed)
            if request.is_planned:
                delivery.sums_bytes += sent * sum(
                    move.unit == unit and move.receiver in request.addresses for move in delivery.moves
                )
        if delivery.sums_bytes > delivery.max_sums_bytes:
            # The first member waits for this host no more, and lets the change come.
            self._tell(request.host, COPIES_HERE_MAIL, NO_COPIES, number=1)

    def _begin_packing(self, delivery: CopyDelivery, step: int) -> None:
        # Beside training, which calls `wait_until_packed` before it donates the memory of these arrays.
        self._packer = self._packer or ThreadPoolExecutor(1, thread_name_prefix=f"rj-copies-{self._own}")
        futures: list[Future[None]] = []
        for unit in delivery.units:
            leaves = jax.tree.leaves(self._state.states[unit])
            for leaf in leaves:
                # JAX makes the list of shards at the first read; two threads must not do that at once.
                _ = leaf.addressable_shards
            receivers = [move.receiver for move in delivery.moves if move.unit == unit]
            key = MailKey(self.generation, self._about, COPY_MAIL, step, unit)
            futures.append(self._packer.submit(_send_packed, self._service, receivers, key, leaves))
        self._packing = tuple(futures)

    def _send_sums(self, delivery: CopyDelivery, unit: int, committed: CommittedStep) -> int:
        """Send the sums of a unit; return their bytes."""
        sums = committed.sums[unit]
        table = committed.table
        numbers = np.array([table.norm, table.loss, table.divisor], np.float32)
        names = describe_sums(self._state.units[unit], self._changed)
        data = pack_arrays([numbers, *(sums[name] for name in names)])
        # Keyed by the step of the copy that they update, so a copy asks for the next sums by its own step.
        key = self._make_key(COPY_SUMS_MAIL, committed.step - 1, unit)
        for move in delivery.moves:
            if move.unit == unit:
                self._service.send(move.receiver, _make_mail(key, data))
        return data.nbytes

    # Whoever receives copies.

    def _take(self) -> bool:
        """Take the copies that have come, and update them by all sums that have; return whether something had come."""
        box, has_come = self._service.box, False
        if self._request is None:
            return False
        while (mail := box.try_take_kind(COPY_MAIL, lambda key: key.step == self._about)) is not None:
            unit, step, has_come = mail.key.block, mail.key.microbatch, True
            leaves, structure = jax.tree.flatten(self._shapes[unit])
            # A copy: each array would keep the one buffer in which all of them have arrived.
            arrays = [np.array(array) for array in unpack_arrays(mail.data, leaves, str(mail.key))]
            if unit in self._wanted:
                state = place_unit(self._state.units[unit], structure.unflatten(arrays), self._sharding)
                self._copies[unit] = _Copy(step, state)
        # A state takes longer to pack than sums: those of several steps may have come before it.
        for unit, copy in self._copies.items():
            while (mail := box.try_take(self._make_key(COPY_SUMS_MAIL, copy.step, unit))) is not None:
                self._update(unit, copy, mail)
                has_come = True
        return has_come

    def _update(self, unit: int, copy: _Copy, mail: Mail) -> None:
        described = describe_sums(self._state.units[unit], self._changed)
        shapes = [jax.ShapeDtypeStruct((3,), np.float32), *described.values()]
        (norm, loss, divisor), *sums = unpack_arrays(mail.data, shapes, str(mail.key))
        placed = place_sums(self._state.units[unit], dict(zip(described, sums, strict=True)), self._sharding)
        table = CommitTable(divisor=float(divisor), norm=float(norm), loss=float(loss), results={})
        copy.state = self._state.make_next(unit, copy.state, placed, table)
        copy.step += 1

    def finish(self, step: int, check: Callable[[], None]) -> dict[int, UnitState]:
        """Return the copies that are of a step, by unit, when they and the sums since have come; then have none.

        Args:
            step: the number of committed steps that all hosts go on with.
            check: raises what ends the wait.
        """
        deadline_s, has_all_hosts = time.monotonic() + CATCH_UP_TIMEOUT_S, True
        while True:
            check()
            try:
                self._take()
            except ResilientJaxError:  # a host sends what does not fit
                self._wanted, self._copies = frozenset(), {}
            is_late = (
                time.monotonic() > deadline_s or not has_all_hosts or self._was_told(COPIES_STOPPED_MAIL)
            )
            # What others are to have of this host must be packed, too: `drop` ends the thread that sends it.
            has_all = self._wanted <= self._copies.keys() and all(
                copy.step >= step for copy in self._copies.values()
            )
            if is_late or (has_all and all(future.done() for future in self._packing)):
                break
            # Some host sends no more: after one more look at what has come there is nothing to wait for.
            has_all_hosts = not self._service.box.wait_for_more(CHECK_INTERVAL_S)
        # A copy that lacks sums is of an earlier step: its unit moves as if there were no copy.
        states = {unit: copy.state for unit, copy in self._copies.items() if copy.step == step}
        self.drop()
        return states

    def leave(self, hosts: Collection[HostName]) -> None:
        """Stop if the host that asked for copies is none of the next generation, and was to join; it is told."""
        request = self._request
        if request is not None and request.host not in hosts and not request.is_planned:
            self.stop()
            with contextlib.suppress(
                ResilientJaxError
            ):  # what is not sent when a generation begins is dropped
                self._service.wait_sent(time.monotonic() + TELL_TIMEOUT_S)

    def stop(self) -> None:
        """Send no more, and tell the host that has asked, and all that have copies; drop those that are here."""
        if self._request is not None and self._delivery is not None:
            if self._request.is_planned:
                with contextlib.suppress(ResilientJaxError):
                    self._tell(self._request.host, COPIES_HERE_MAIL, NO_COPIES, number=1)
            for host in sorted({self._request.host, *(move.receiver for move in self._delivery.moves)}):
                with contextlib.suppress(ResilientJaxError):
                    self._tell(host, COPIES_STOPPED_MAIL)
        self.drop()

    def drop(self, wait_s: float = 0.0) -> None:
        """Drop all copies, and send no more. Mail of another request, some of which comes before it, is kept.

        Args:
            wait_s: for how long to wait for what is being packed: until then a thread has arrays on devices.
        """
        self._request, self._delivery, self._wanted, self._copies = None, None, frozenset(), {}
        for kind in (COPY_MAIL, COPY_SUMS_MAIL):
            while self._service.box.try_take_kind(kind, lambda key: key.step == self._about) is not None:
                continue
        if self._packer is not None:
            self._packer.shutdown(wait=False, cancel_futures=True)
            self._packer = None
        wait_for_futures([future for future in self._packing if not future.cancelled()], wait_s)
        # What has failed has arrays in its traceback.
        self._packing = tuple(future for future in self._packing if not future.done())

    def _was_told(self, kind: MailKind) -> bool:
        """Return whether any host has sent such a message about this request."""
        request = self._request
        if request is None:
            return False
        keys = [self._make_key(kind, 0, index) for index in range(len(request.wanted))]
        # A list, not a generator: each message is taken, or the next call would find it.
        return any([self._service.box.try_take(key) is not None for key in keys])

    def _make_key(self, kind: MailKind, step: int, unit: int) -> MailKey:
        return MailKey(self.generation, self._about, kind, step, unit)

    def _tell(self, to: HostName, kind: MailKind, text: bytes = b"", number: int = 0) -> None:
        """Send a message about this request; each number of a kind once."""
        assert self._request is not None, "there is one"
        # A key has no sender, and is taken once: each host has an index of its own in its keys.
        index = sorted(self._request.wanted).index(self._own)
        self._service.send(to, _make_mail(self._make_key(kind, number, index), memoryview(text)))


def _has_sent(
    service: MailCarrier, request: CopyRequest, delivery: CopyDelivery, packing: Sequence[Future[None]]
) -> bool:
    """Return whether hosts that join by a planned change, which do not say what they have, were sent all of it."""
    spares = {move.receiver for move in delivery.moves}.intersection(request.addresses)
    if not request.is_planned or not spares:
        return True
    is_packed = delivery.since_s is not None and all(future.done() for future in packing)
    return is_packed and all(map(service.has_sent, spares))


def _send_packed(
    service: MailCarrier, receivers: Sequence[HostName], key: MailKey, leaves: list[jax.Array]
) -> None:
    data = pack_arrays(leaves)
    for host in receivers:
        service.send(host, _make_mail(key, data))


def _make_mail(key: MailKey, data: memoryview) -> Mail:
    return Mail(key=key, data=data, shape=(data.nbytes,))
