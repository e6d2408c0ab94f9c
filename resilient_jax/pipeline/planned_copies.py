"""When a planned change of members may come: once all members have copies of the units that they are about to hold.

The first member asks all for copies (`unit_copies`), knows when all have them, and says after which step all let the
change come. That is the next one: to commit it, each host needs mail that the first one sends after having said so. So
all let it come between the same two steps, and none waits for an order in a step that others need it for.
"""

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from resilient_jax.errors import ResilientJaxError
from resilient_jax.host_exchange.step_mail import MailCarrier
from resilient_jax.ids import HostName
from resilient_jax.pipeline.copy_requests import ANY_STEP, COPIES_HERE_MAIL, COPIES_WANTED_MAIL, CopyRequest
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind

COPIES_DONE_MAIL: Final = MailKind("copies_done")
"""After which step all members let the change come that copies were made for."""

NO_DATA: Final = memoryview(b"")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Change:
    """A change that the first member prepares.

    Attributes:
        number: generation that the change leads to.
        hosts: the members.
        missing: members that have not said that they have all copies.
        deadline_s: time of the monotonic clock when the change comes all the same.
    """

    number: int
    hosts: tuple[HostName, ...]
    missing: set[HostName]
    deadline_s: float


class PlannedCopies:
    """What a member says and hears about planned changes of one generation.

    Attributes:
        prepared: the newest change that this host has prepared, as the first member.
    """

    def __init__(self, own: HostName, generation: int, service: MailCarrier) -> None:
        """Have no change planned.

        Args:
            generation: number of the members' generation.
            service: carrier of this host's mail.
        """
        self._own = own
        self._generation = generation
        self._service = service
        self.prepared = 0
        self._change: _Change | None = None
        self._allowed: tuple[int, int] | None = None
        """The change that all let come, and the number of committed steps after which they do."""

    def prepare(
        self,
        number: int,
        wanted: Mapping[HostName, Collection[int]],
        addresses: Mapping[HostName, str],
        deadline_s: float,
    ) -> None:
        """Have copies made for a change; the first member calls this, once.

        Args:
            number: generation that the change leads to.
            wanted: the units that each host is to hold then: none if the host leaves.
            addresses: mailbox addresses of the hosts that are no members.
            deadline_s: time of the monotonic clock when the change comes all the same.
        """
        self.prepared = number
        hosts = tuple(sorted(wanted.keys() - addresses.keys()))
        for host, address in sorted(addresses.items()):
            self._service.add_peer(host, address, may_be_lost=True)
        self._change = _Change(number=number, hosts=hosts, missing=set(hosts), deadline_s=deadline_s)
        asked = {host: tuple(sorted(units)) for host, units in sorted(wanted.items())}
        request = CopyRequest(host=self._own, addresses=dict(addresses), wanted=asked, number=number)
        data = memoryview(msgspec.msgpack.encode(request))
        self._send(wanted, MailKey(self._generation, ANY_STEP + number, COPIES_WANTED_MAIL, 0, 0), data)

    def pass_commit(self, step: int) -> int | None:
        """Return the number of the change that all members let come now; None: none comes.

        Args:
            step: the number of committed steps.
        """
        if self._change is not None and self._is_ready(self._change):
            change, self._change = self._change, None
            key = MailKey(
                self._generation, ANY_STEP + change.number, COPIES_DONE_MAIL, microbatch=step + 1, block=0
            )
            self._send(change.hosts, key, NO_DATA)
        while (mail := self._service.box.try_take_kind(COPIES_DONE_MAIL)) is not None:
            self._allowed = mail.key.step - ANY_STEP, mail.key.microbatch
        if self._allowed is None or step < self._allowed[1]:
            return None
        (number, _), self._allowed = self._allowed, None
        return number

    def _is_ready(self, change: _Change) -> bool:
        """Return whether all have their copies, or some member makes none any more, or it is late."""
        has_all = True
        about = ANY_STEP + change.number
        box = self._service.box
        while (mail := box.try_take_kind(COPIES_HERE_MAIL, lambda key: key.step == about)) is not None:
            host = HostName(bytes(mail.data).decode())
            has_all = has_all and bool(host)
            change.missing.discard(host)
        return not has_all or not change.missing or time.monotonic() > change.deadline_s

    def _send(self, hosts: Collection[HostName], key: MailKey, data: memoryview) -> None:
        for host in hosts:
            try:
                self._service.send(host, Mail(key=key, data=data, shape=(data.nbytes,)))
            except ResilientJaxError:  # it is lost: the generation ends
                continue
