"""Tests with processes, sockets, signals, files."""

import pytest

from tests.support.quick_compiling import compile_quickly


def pytest_configure(config: pytest.Config) -> None:
    compile_quickly(config)
