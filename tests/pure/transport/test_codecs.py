"""The examples in the docstrings, and the table of errors that may cross the wire."""

import doctest

import pytest

from resilient_jax.errors import InternalError, PeerUnreachable, Unauthenticated
from resilient_jax.store import interface
from resilient_jax.transport import authentication, error_codec, method
from resilient_jax.transport.error_codec import ERROR_CLASSES, decode_error, encode_error

StatusCode = error_codec.grpc.StatusCode  # grpc would log to stderr if imported before our package


@pytest.mark.parametrize("module", [authentication, method, interface], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(module, extraglobs={"msgspec": __import__("msgspec")})
    assert result.attempted > 0
    assert result.failed == 0


def test_only_errors_of_this_package_cross_by_name():
    assert "ExitCode" not in ERROR_CLASSES
    assert ERROR_CLASSES["Unauthenticated"] is Unauthenticated
    assert all(issubclass(value, Exception) for value in ERROR_CLASSES.values())


def test_a_sender_cannot_name_a_class_outside_the_error_tree():
    error = decode_error(
        StatusCode.FAILED_PRECONDITION,
        "boo",
        [("rj-error", "SystemExit")],
        address="h:1",
        path="/s/m",
        timeout_s=1.0,
    )
    assert type(error) is InternalError


def test_a_foreign_subclass_is_sent_as_its_nearest_class_in_the_error_tree():
    class HandshakeFailed(PeerUnreachable):
        pass

    failure = encode_error(HandshakeFailed("h"), "/s/m")
    assert failure.trailing_metadata == (("rj-error", "PeerUnreachable"),)


@pytest.mark.parametrize(
    ("details", "refused"),
    [
        ("failed to connect to all addresses; ... connect: Connection refused (111)", True),
        ("unix:/tmp/x: No such file or directory", True),
        ("Socket closed", False),
        ("Stream removed (ping timeout)", False),
        ("", False),
    ],
)
def test_only_a_connection_that_the_machine_rejects_counts_as_refused(details, refused):
    error = decode_error(StatusCode.UNAVAILABLE, details, None, address="h:1", path="/s/m", timeout_s=1.0)
    assert isinstance(error, PeerUnreachable)
    assert error.is_refused is refused
    assert str(error).startswith("h:1 ")
    assert "/s/m" in str(error)
