"""Tests that change what their whole process may do, and so have one of their own."""

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.patience import patience

PYTEST_MARK = "PYTEST_CURRENT_TEST"
"""The environment variable that pytest sets while it runs a test."""


def in_own_process(test: Callable[[], None]) -> Callable[[], None]:
    """Return the test such that it runs in a new Python process, where no thread of another test disturbs it."""
    module = Path(inspect.getfile(test))

    @functools.wraps(test)
    def run() -> None:
        if not is_run_by_pytest():
            test()
            return
        environment = {name: value for name, value in os.environ.items() if name != PYTEST_MARK}
        done = subprocess.run(
            [sys.executable, "-c", f"import {module.stem}; {module.stem}.{test.__name__}()"],
            env={**environment, "PYTHONPATH": os.pathsep.join([str(module.parent), *sys.path])},
            capture_output=True,
            text=True,
            timeout=patience(12),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def is_run_by_pytest() -> bool:
    """Return whether this process is one of pytest's, which runs other tests, too."""
    return PYTEST_MARK in os.environ
