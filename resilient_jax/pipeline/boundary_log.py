"""What a host has sent in this step, so that it can be sent again to a host that takes over from a dead one."""

import collections
from collections.abc import Set as AbstractSet

from resilient_jax.pipeline_schedule.tasks import Boundary


class BoundaryLog:
    """Boundary values of one step in host memory, the newest ones up to a number of bytes.

    A value costs no copy: it is the memory that is sent, on a CPU maybe that of an array.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin empty; `max_bytes` of 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._values: collections.OrderedDict[Boundary, memoryview] = collections.OrderedDict()
        self._bytes_held = 0
        self._forgotten: set[Boundary] = set()

    @property
    def forgotten(self) -> AbstractSet[Boundary]:
        """The values of this step that were sent, and are no longer here: to send one again is to compute it again."""
        return frozenset(self._forgotten)

    def record(self, boundary: Boundary, value: memoryview) -> None:
        """Keep a value that is sent; the oldest ones are forgotten for it."""
        self._drop(boundary)
        self._forgotten.discard(boundary)
        self._values[boundary] = value
        self._bytes_held += value.nbytes
        # The oldest are the most likely to have been used: only what no task has used is sent again.
        while self._bytes_held > self._max_bytes:
            oldest = next(iter(self._values))
            self._drop(oldest)
            self._forgotten.add(oldest)

    def get(self, boundary: Boundary) -> memoryview | None:
        """Return a value, if it is here."""
        return self._values.get(boundary)

    def move_to_host(self) -> None:
        """Copy every value: that of a single array is a view of memory of the devices' backend, which goes away."""
        for boundary, value in self._values.items():
            self._values[boundary] = memoryview(bytearray(value))

    def clear(self) -> None:
        """Drop everything: the step is committed."""
        self._values.clear()
        self._forgotten.clear()
        self._bytes_held = 0

    def _drop(self, boundary: Boundary) -> None:
        value = self._values.pop(boundary, None)
        if value is not None:
            self._bytes_held -= value.nbytes
