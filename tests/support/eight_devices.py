"""A fixture that gives the tests of a module eight CPU devices in this process, and restores the default afterwards.

XLA_FLAGS would have to be set before the first use of JAX in the process, and every subprocess would inherit it.
"""

import jax
import pytest
from jax.extend.backend import clear_backends

DEVICES = 8
BY_XLA_FLAGS = -1
"""JAX's default: the number in `XLA_FLAGS`, or one."""


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    """Yield eight CPU devices; a module that imports this name uses them in all its tests."""
    clear_backends()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    yield jax.devices()
    clear_backends()
    jax.config.update("jax_num_cpu_devices", BY_XLA_FLAGS)
