"""The messages between an agent and the standby of its worker (see `connection`).

The agent sends `PrepareStandby` once; the standby answers `StandbyReady` when it waits, or `StandbyUnfit`. To
`PromoteStandby`, which carries the worker's descriptors, it answers `StandbyPromoted` and is the worker from then on,
or `StandbyUnfit` and ends.
"""

import msgspec

from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings

STANDBY_CONNECTION_VARIABLE = "RESILIENT_JAX_STANDBY_CONNECTION"
"""Environment variable with the standby's end of the connection to its agent, as a file descriptor."""


class PrepareStandby(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: get as far as a worker can without a world, and wait.

    Attributes:
        command: path of the script, and its arguments.
        imports: modules to import.
        program: id as in `WorkerSettings`.
    """

    command: tuple[str, ...]
    imports: ImportsReported
    program: str = ""


class PromoteStandby(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: be the worker. Its descriptors: the connections to agent and snapshot server, the death pipe.

    Attributes:
        environment: environment that a worker starts with, for the script to find.
    """

    settings: WorkerSettings
    environment: dict[bytes, bytes]


class StandbyReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The standby waits for its promotion.

    Attributes:
        failed_imports: modules that the standby could not import; the script imports them itself.
    """

    failed_imports: int = 0


class StandbyPromoted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The standby is the worker; nothing follows on this connection."""


class StandbyUnfit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The standby cannot replace the worker, and ends."""

    reason: str


StandbyOrder = PrepareStandby | PromoteStandby
StandbyMessage = StandbyReady | StandbyPromoted | StandbyUnfit

STANDBY_ORDER_DECODER: msgspec.msgpack.Decoder[StandbyOrder] = msgspec.msgpack.Decoder(StandbyOrder)
STANDBY_MESSAGE_DECODER: msgspec.msgpack.Decoder[StandbyMessage] = msgspec.msgpack.Decoder(StandbyMessage)
