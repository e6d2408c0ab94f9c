"""A fixture that gives the tests of a module eight CPU devices in this process, and takes them back afterwards.

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
    """Eight CPU devices, for a module that imports this name."""
    clear_backends()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    yield jax.devices()
    clear_backends()
    jax.config.update("jax_num_cpu_devices", BY_XLA_FLAGS)
