"""What can go wrong with shards; the base class says whose move it is."""

from resilient_jax.errors import CallerError, InternalError, OperatorError, PeerError


class ErasureCodeError(CallerError):
    """Shards, buffers or a matrix do not fit the code or each other."""


class TooManyErasures(ErasureCodeError):
    """More shards are lost than the code has parity shards: their bytes cannot be computed."""


class KernelUnavailable(OperatorError):
    """The kernel that was asked for, or a library that it needs, is not on this machine."""


class KernelSelfTestFailed(InternalError):
    """A kernel's bytes are not those of reedsolo; it may not be used on this machine."""


class NotRepaired(PeerError):
    """Shards hold errors that cannot be located, or whose repair did not pass its checksum; nothing was changed."""
