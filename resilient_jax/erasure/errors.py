"""Errors of the erasure code. The base class says whose move it is."""

from resilient_jax.errors import CallerError, InternalError, OperatorError


class ErasureCodeError(CallerError):
    """Shards, buffers or a matrix do not fit the code or each other."""


class TooManyErasures(ErasureCodeError):
    """More shards are lost than the code has parity shards: their bytes cannot be computed."""


class KernelUnavailable(OperatorError):
    """The requested kernel, or a library that it needs, is not on this machine."""


class KernelSelfTestFailed(InternalError):
    """The bytes that a kernel computes are not those of reedsolo; it must not be used on this machine."""
