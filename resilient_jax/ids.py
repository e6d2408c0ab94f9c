"""Types of identifiers, so that a lease is never passed where a revision is meant."""

from typing import Final, NewType

JobName = NewType("JobName", str)
HostName = NewType("HostName", str)

GenerationNumber = NewType("GenerationNumber", int)
"""The number of an agreed membership. Only grows; never given out twice in a job."""

WorldId = NewType("WorldId", int)
"""One coordination service's lifetime. Shrinking and growing in place keep the world, a re-form opens a new one."""

Seat = NewType("Seat", int)
"""A place in a world, taken once: the id under which a worker registers with the world's coordination service."""
DEVICE_IDS_PER_SEAT: Final = 2048
"""On CPU (XLA's `kMaxDevicesPerProcess`): a device's id is so many times its seat, and its number there."""

ProcessIndex = NewType("ProcessIndex", int)
"""A worker's index among the members of a generation, dense from 0: what `jax.process_index()` returns."""

Incarnation = NewType("Incarnation", int)
"""Grows with each start of one host's worker, so that a restarted worker is never taken for its predecessor."""

LeaseId = NewType("LeaseId", int)
Revision = NewType("Revision", int)
"""The store's logical time: grows by one with every change, as in etcd."""
