"""The gRPC method by which an agent has another one write its host's status to the store, with its messages."""

from typing import Annotated, Final

import msgspec

from resilient_jax.ids import LeaseId, Revision
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.transport.method import Method

SERVICE: Final = "rj.statuses"
NOT_WRITTEN: Final = Revision(0)
_POSITIVE: Final = msgspec.Meta(gt=0, le=2**63 - 1)


class StatusWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A host's status, as its agent would write it to the store.

    Attributes:
        lease: lease of the host; the status is gone with the lease.
        replaced: `mod_revision` of the status that this one replaces; in place of any other status nothing is written.
    """

    status: HostStatus
    lease: Annotated[LeaseId, _POSITIVE]
    replaced: Annotated[Revision, _POSITIVE]


class StatusReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `StatusWrite`.

    Attributes:
        revision: revision in which the status was written; `NOT_WRITTEN`: perhaps the status was not written, and the
            sender writes it.
    """

    revision: Revision


WRITE: Final = Method("write", StatusWrite, StatusReceipt)
