"""Sockets of this process are told apart by what they are, not by the number of their descriptor."""

import socket
from pathlib import Path

from resilient_jax.jax_runtime.gloo import list_sockets


def test_a_socket_under_the_number_of_a_closed_one_is_another() -> None:
    first = socket.socket()
    number, before = first.fileno(), list_sockets()
    first.close()
    with socket.socket() as second:
        assert second.fileno() == number, "the kernel gives the lowest free number"
        assert list_sockets() != before


def test_files_that_come_and_go_are_no_sockets(tmp_path: Path) -> None:
    before = list_sockets()
    with (tmp_path / "file").open("w"), socket.socket() as one:
        assert len(list_sockets() - before) == 1
        assert one.fileno() >= 0
    assert list_sockets() == before
