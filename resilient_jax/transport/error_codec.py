"""The codec of errors: our classes as gRPC statuses and back.

Rules. An error of ours that a handler raises arrives as the same class with the same message. Any other exception
arrives as InternalError, with its type and text, and is logged with its traceback on the side that raised it. The
name of the class travels in the trailing metadata, the message in gRPC's details.
"""

import dataclasses
from collections.abc import Iterable

import grpc

from resilient_jax import errors
from resilient_jax.errors import (
    InternalError,
    MessageError,
    PeerUnreachable,
    ResilientJaxError,
    Unauthenticated,
)
from resilient_jax.transport.call_proofs import StaleSession
from resilient_jax.transport.method import MAX_MESSAGE_BYTES

ERROR_KEY = "rj-error"
MAX_DETAILS_BYTES = 2000
"""The limit in UTF-8. gRPC may refuse metadata of more than 8 KiB, and percent-encodes a byte as up to three."""

ERROR_CLASSES: dict[str, type[ResilientJaxError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ResilientJaxError)
}
"""The error classes by name: all that a peer's answer may raise here."""

STALE_CODE = grpc.StatusCode.ABORTED
"""The status of a call that was not served, as the server does not know its session (see `call_proofs`)."""

_REFUSED_DETAILS = ("Connection refused", "No such file or directory")
"""Texts in gRPC's details where no process listens: the system's messages for ECONNREFUSED and, for Unix sockets,
ENOENT. gRPC offers no other way to recognize that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """An error as the status of a gRPC call."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def encode_error(error: BaseException, path: str) -> ErrorStatus:
    """Return the status with which a server answers when the handler of `path` raised `error`."""
    name, details = name_error(error, path)
    return ErrorStatus(code=_choose_code(error), details=details, trailing_metadata=((ERROR_KEY, name),))


def name_error(error: BaseException, path: str) -> tuple[str, str]:
    """Return the class, by its name in `errors.py`, and the message of what the handler of `path` raised."""
    if isinstance(error, ResilientJaxError):
        name, details = type(error).__name__, str(error)
        if name not in ERROR_CLASSES:  # a subclass outside errors.py travels as its nearest class there
            name = next(base.__name__ for base in type(error).__mro__ if base.__name__ in ERROR_CLASSES)
    else:
        name, details = InternalError.__name__, f"{path} failed: {type(error).__name__}: {error}"
    return name, _truncate(details)


def _truncate(details: str) -> str:
    encoded = details.encode(errors="replace")
    if len(encoded) <= MAX_DETAILS_BYTES:
        return encoded.decode()
    return encoded[:MAX_DETAILS_BYTES].decode(errors="ignore") + " ..."


def _choose_code(error: BaseException) -> grpc.StatusCode:
    match error:
        case StaleSession():
            return STALE_CODE
        case Unauthenticated():
            return grpc.StatusCode.UNAUTHENTICATED
        case MessageError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case ResilientJaxError():
            return grpc.StatusCode.FAILED_PRECONDITION
        case _:
            return grpc.StatusCode.INTERNAL


def is_named(trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether a handler has raised the error of a call, or what answers in its place says so."""
    return any(key == ERROR_KEY for key, _ in trailing_metadata or ())


def decode_error(
    code: grpc.StatusCode,
    details: str | None,
    trailing_metadata: Iterable[tuple[str, str | bytes]] | None,
    *,
    address: str,
    path: str,
    timeout_s: float | None,
) -> ResilientJaxError:
    """Return the error that a client raises when its call of `path` at `address` ended with `code`."""
    details = details or ""
    name = next((value for key, value in trailing_metadata or () if key == ERROR_KEY), None)
    # Raised by the peer's handler; without a name it is gRPC that reports, about the connection.
    if isinstance(name, str) and name in ERROR_CLASSES:
        return _rebuild_error(ERROR_CLASSES[name], details, address, path)
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerUnreachable(f"{address} did not answer {path} within {timeout_s} s")
        case grpc.StatusCode.UNAVAILABLE:
            if any(text in details for text in _REFUSED_DETAILS):
                text = f"{address} refused the connection for {path}: no process listens there"
                return PeerUnreachable(text, is_refused=True)
            return PeerUnreachable(f"{address} cannot be reached for {path}: {details}")
        case grpc.StatusCode.CANCELLED:
            return PeerUnreachable(f"{address} closed while it served {path}, or our channel to it did")
        case grpc.StatusCode.UNIMPLEMENTED:
            return MessageError(
                f"{address} does not serve {path}; does it run the same version of resilient_jax?"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageError(
                f"a message of {path} with {address} is too large "
                f"(at most {MAX_MESSAGE_BYTES} bytes): {details}"
            )
        case _:
            return InternalError(f"{path} at {address} ended with {code.name}: {details}")


def _rebuild_error(
    error_class: type[ResilientJaxError], details: str, address: str, path: str
) -> ResilientJaxError:
    if error_class is Unauthenticated:
        details = (
            f"{address} refused our job token for {path}: {details}. "
            "Every process of a job must be given the same token"
        )
    return error_class(details)
