"""Has a job fail where an array is put on devices of several hosts by `jax.device_put`.

It compares what the hosts put, by a collective for each array: in a step that would be one for each parameter, which
hosts that finish a step alone would wait in for ever.
"""

from jax.experimental import multihost_utils


def refuse_comparisons() -> None:
    """Raise from now on where JAX would compare values of all hosts."""

    def refuse(*_: object) -> None:
        raise AssertionError("found a jax.device_put onto devices of several hosts, expected none in a step")

    multihost_utils.assert_equal = refuse
