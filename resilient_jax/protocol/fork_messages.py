"""The messages of a fork server: a process that has imported what a script imports, and forks workers from itself.

Its launcher gives it a connection for each agent (`ServeAgent`). An agent orders workers (`ForkWorker`); each order is
answered in turn, by `WorkerForked` or `ForkRefused`. The end of a worker is reported (`WorkerEnded`), but its process
id stays taken until the agent has confirmed (`ReapWorker`), so that until then the agent's signals meet no other
process. The workers of an agent whose connection closes are killed, for no worker outlives its agent.
"""

import msgspec

from resilient_jax.protocol.worker_messages import WorkerSettings

FORK_SERVER_VARIABLE = "RESILIENT_JAX_FORK_SERVER"
"""Environment variable with an agent's end of its connection to the fork server, as a file descriptor."""


class ServeAgent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order of the launcher: serve one more agent. Its descriptor: the server's end of the connection."""


class ForkWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: fork a worker. Its descriptors: standard output and error, and then those of `PromoteStandby`.

    Attributes:
        command: path of the script, and its arguments.
        environment: environment that the script is to find; the server's, or the server refuses the order.
    """

    command: tuple[str, ...]
    settings: WorkerSettings
    environment: dict[bytes, bytes]


class ReapWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: reap this worker, which has ended; the agent sends no more signals to it."""

    pid: int


class WorkerForked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker runs.

    Attributes:
        num_modules: modules that the worker has imported already.
    """

    pid: int
    num_modules: int


class ForkRefused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The server cannot fork this worker; it is to be started as a process of its own."""

    reason: str


class WorkerEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker has ended.

    Attributes:
        exit_code: negative for a signal.
    """

    pid: int
    exit_code: int


ForkOrder = ServeAgent | ForkWorker | ReapWorker
ForkMessage = WorkerForked | ForkRefused | WorkerEnded

FORK_ORDER_DECODER: msgspec.msgpack.Decoder[ForkOrder] = msgspec.msgpack.Decoder(ForkOrder)
FORK_MESSAGE_DECODER: msgspec.msgpack.Decoder[ForkMessage] = msgspec.msgpack.Decoder(ForkMessage)
