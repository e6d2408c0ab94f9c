"""Every error that resilient_jax raises on purpose, and the exit codes of its commands.

The four classes below the root say whose move it is: the caller's (their arguments, their configuration, their code),
the operator's (the machine, the network, the token), a peer's (a message or host that is not as agreed) or ours (a
bug). A message says what was found, what was expected, where, and what to do.
"""

import enum
import errno
from typing import Final

EXHAUSTION_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})
"""Errors of the kernel that mean that a resource is used up."""


class ExitCode(enum.IntEnum):
    """The exit codes of `resilient-jax agent` and `launch`.

    A worker's own positive code is passed through when the job ends with the user's error, so ours start high where
    scripts rarely go.
    """

    DONE = 0
    """Training is done, and so is the script."""
    USAGE = 2
    """Bad input: a flag, a file or a configuration; nothing was started."""
    OUT_OF_RESOURCES = 75
    """The machine had no descriptor, process or memory left for this agent: start it again (sysexits' EX_TEMPFAIL)."""
    STORE_LOST = 80
    """The store stayed unreachable for 20 times `lease_ttl_s`."""
    RESTART_BUDGET_EXHAUSTED = 81
    """A worker died more often than its restart budget allows."""
    TOO_FEW_HOSTS = 82
    """Not enough hosts came, or stayed, for the job to go on."""
    JOIN_REFUSED = 83
    """This host may not join: host name taken, versions differ, wrong token, or a GPU that must not train."""
    DRAINED = 84
    """This host left after a notice (SIGTERM), and the others go on; or all hosts did. The outcome says up to which
    step the job is saved, and whether steps since then are lost."""
    STATE_LOST = 85
    """Every holder of the training state died at once, and nothing else holds it."""
    SCRIPT_DIFFERS = 86
    """The job's other hosts run another script, or the same with other arguments, modules or versions."""
    HOST_CORRUPT = 87
    """This host computes wrongly: an audit has found other results on it than on two other hosts. Examine it."""
    INTERNAL_ERROR = 89
    """A bug of ours."""
    INTERRUPTED = 130
    """Ctrl-C: the job, or this host, ended at once; steps since the last checkpoint may be lost."""


class ResilientJaxError(Exception):
    """The root of all our errors."""

    exit_code: ExitCode = ExitCode.INTERNAL_ERROR


class CallerError(ResilientJaxError):
    """The caller's move: an argument, a configuration or a script is wrong."""

    exit_code = ExitCode.USAGE


class TooFewHosts(CallerError):
    """Fewer hosts live than one replica spans.

    Attributes:
        needed: how many it spans; 0: it is not known any more.
    """

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class ConfigError(CallerError):
    """A configuration file or value does not fit; the message names file, key, found, expected."""


class StateError(CallerError):
    """The training state cannot be handed over or restored as asked."""


class DataError(CallerError):
    """The training data is not as its source promised; the message names the item, found, expected."""


class SnapshotRefused(CallerError):
    """Snapshots as configured do not fit this machine or these hosts; the message has the sizes."""


class NonFiniteError(CallerError):
    """A microbatch's loss or gradient has a NaN or an infinity; nothing of its step was committed.

    Attributes:
        step: the step of the microbatch.
        microbatch: index of the microbatch in the step.
        host: the host that computed the microbatch.

    All are None in an error that came from another process: only its message travels.
    """

    def __init__(
        self, message: str, *, step: int | None = None, microbatch: int | None = None, host: str | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.microbatch = microbatch
        self.host = host


class OperatorError(ResilientJaxError):
    """The operator's move: the machine, the network or the deployment is not as needed."""

    exit_code = ExitCode.USAGE


class StoreUnreachable(OperatorError):
    """The store did not answer in time."""

    exit_code = ExitCode.STORE_LOST


class StoreReplaced(StoreUnreachable):
    """Another store answers at the address: the one before is gone, with everything it held."""


class AddressInUse(OperatorError):
    """Another process listens on the address."""


class LogUnwritable(OperatorError):
    """A log file cannot be written (disk full, permissions)."""


class KeptFileDamaged(OperatorError):
    """A file of the job's program in the run folder is gone, or not what a process of the job has written there."""


class OutOfResources(OperatorError):
    """The machine has no descriptor, process or memory left; trying again later may help."""

    exit_code = ExitCode.OUT_OF_RESOURCES


class JoinRefused(OperatorError):
    """The job does not let this host in."""

    exit_code = ExitCode.JOIN_REFUSED


class ScriptRefused(JoinRefused):
    """The job's other hosts run another script than this host, or the same in another way."""

    exit_code = ExitCode.SCRIPT_DIFFERS


class HostCorrupt(JoinRefused):
    """This host computes wrongly, as an audit has found."""

    exit_code = ExitCode.HOST_CORRUPT


class GpuUnfit(JoinRefused):
    """A GPU of this host must not train; the message says which, and why."""


class GpusUnreadable(OperatorError):
    """NVML cannot be used, so GPUs are not watched; the message says what is missing."""


class ComputationsDiffer(OperatorError):
    """Two hosts computed different bits of the same microbatch, and there is no third host to tell which is wrong."""


class Unauthenticated(JoinRefused):
    """The job token is missing or wrong."""


class SnapshotLost(OperatorError):
    """More of a snapshot is gone than its parity covers; the message says what is lost and what survives."""

    exit_code = ExitCode.STATE_LOST


class CheckpointFailed(OperatorError):
    """A checkpoint could not be written to storage; those before it are still there."""


class CheckpointUnreadable(OperatorError):
    """A checkpoint on storage is incomplete, damaged or none; the message says how."""


class SnapshotDropped(OperatorError):
    """This snapshot is not taken: the one before it is not yet safe. Training goes on; the next one may be taken."""


class PeerError(ResilientJaxError):
    """A peer's move: what came from another process is not as agreed."""


class MessageError(PeerError):
    """A message does not decode; the error names the method and the field."""


class PeerUnreachable(PeerError):
    """A peer did not answer in time, or refused the connection.

    Attributes:
        is_refused: the peer's machine answered that no process listens there: the peer is dead, or not up yet; no need
            to wait for a timeout.
    """

    def __init__(self, message: str = "", *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class ChecksumMismatch(PeerError):
    """The bytes that arrived are not the bytes that were sent."""


class SnapshotMissing(PeerError):
    """The server does not hold that snapshot, or not yet: ask again, or another server."""


class StaleGeneration(PeerError):
    """The request is of an older generation than the newest that the peer knows: what it belongs to has ended."""


class CompactedRevision(PeerError):
    """A watch asked for changes that the store has already forgotten; read again, then watch."""


class LeaseExpired(PeerError):
    """The lease is gone: the store counts its holder as dead."""


class InternalError(ResilientJaxError):
    """A bug of ours; please report it."""
