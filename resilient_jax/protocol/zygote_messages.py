"""The messages of a zygote: a process that has imported what a script imports, and forks workers from itself.

The process that starts a zygote, its owner, tells it what to import (`PrepareZygote`), learns when that is done
(`ZygoteReady`), and gives it a connection for each agent (`ServeAgent`). An agent orders workers on its connection
(`ForkWorker`), and sends with each order the end of a socket pair, on which it gets the answer: `ForkRefused` from the
zygote, or `WorkerForked` from the worker's parent, a process that does nothing but wait for the worker's end. The
parent reports that end (`WorkerEnded`), and keeps the worker's process id taken until the agent closes its end: until
then the agent's signals meet no other process. If the agent closes its end before, as by its death, the parent kills
the worker, for no worker outlives its agent.
"""

import msgspec

from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings

ZYGOTE_VARIABLE = "RESILIENT_JAX_ZYGOTE"
"""Environment variable with an agent's end of its connection to the zygote of `launch`, as a file descriptor."""


class PrepareZygote(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First order of the owner: import, and then fork.

    Attributes:
        script: path of the script whose workers are forked.
        environment: variables that each worker must be ordered with; others are refused.
        imports: what a worker of the script has imported; None: what is found in the script's text is imported.
    """

    script: str
    environment: dict[bytes, bytes]
    imports: ImportsReported | None = None


class ServeAgent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order of the owner: serve one more agent. Its descriptor: the zygote's end of the connection."""


class ForkWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: fork a worker.

    Its descriptors: the socket for the answers; standard output and error; the connections to agent and snapshot
    server; the death pipe.

    Attributes:
        command: path of the script, and its arguments.
        environment: environment that the script is to find.
    """

    command: tuple[str, ...]
    settings: WorkerSettings
    environment: dict[bytes, bytes]


class ZygoteReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The zygote has imported what it can.

    Attributes:
        failed_imports: modules of the worker that could not be imported; the script imports them itself.
        obstacle: why it forks no worker; empty: it does.
    """

    failed_imports: int
    obstacle: str


class WorkerForked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker runs.

    Attributes:
        parent: process that reports the worker's end.
        num_modules: modules that the worker has imported already.
    """

    pid: int
    parent: int
    num_modules: int


class ForkRefused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The zygote cannot fork this worker; it is to be started as a process of its own."""

    reason: str


class WorkerEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker has ended.

    Attributes:
        exit_code: negative for a signal.
    """

    exit_code: int


ZygoteOrder = PrepareZygote | ServeAgent | ForkWorker
ZygoteAnswer = WorkerForked | ForkRefused | WorkerEnded

ZYGOTE_ORDER_DECODER: msgspec.msgpack.Decoder[ZygoteOrder] = msgspec.msgpack.Decoder(ZygoteOrder)
ZYGOTE_READY_DECODER: msgspec.msgpack.Decoder[ZygoteReady] = msgspec.msgpack.Decoder(ZygoteReady)
ZYGOTE_ANSWER_DECODER: msgspec.msgpack.Decoder[ZygoteAnswer] = msgspec.msgpack.Decoder(ZygoteAnswer)
